// One table for every page: order, chosen columns and keys of rows. Its state is in the address.
//
//   ?sort=-tokens&columns=name,status,tokens      of the page's first table; `NAME.sort`, `NAME.columns` of another
//
// Rows are in the order of the server (`isServers`), which has them all, or are sorted here.
import { type SortingState, columnVisibilityFeature, createSortedRowModel, rowSortingFeature, tableFeatures, useTable } from "@tanstack/preact-table";
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { useKeys } from "./keys";
import { Explained } from "./parts";
import { amend, usePlace } from "./place";

type Value = string | number | null | undefined;

export interface Column<Row> {
  /** Its name in the address; what the server sorts by, where it sorts. */
  id: string;
  title: ComponentChildren;
  /** A class of its cells, such as `number`. */
  kind?: string;
  cell: (row: Row) => ComponentChildren;
  /** What rows are sorted by here; for a server's table, whether it sorts by the column. Missing: no order. */
  value?: ((row: Row) => Value) | true;
  /** More classes of a cell. */
  paint?: (row: Row) => string;
  /** Words under the pointer. */
  tip?: (row: Row) => string | undefined;
  /** A sentence on its heading. */
  about?: string;
  /** Whether it is left out until it is chosen. */
  isExtra?: boolean;
}

interface Props<Row> {
  /** Before its keys in the address; empty for the page's first table. */
  name?: string;
  /** What it lists, for readers of the screen. */
  label: string;
  class?: string;
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  idOf: (row: Row, index: number) => string;
  /** Whether rows come in the order that the address asks for. */
  isServers?: boolean;
  /** Opens a row: Enter, after j and k. */
  open?: (row: Row) => void;
  /** What stands in place of a row's cells; null for the cells. */
  instead?: (row: Row) => ComponentChildren | null;
  /** Classes of a row. */
  rowClass?: (row: Row) => string;
  onRow?: (row: Row) => void;
  /** The chosen row's id, where the page keeps it; j and k change it by `onChosen`. */
  chosen?: string | null;
  onChosen?: (id: string) => void;
  /** A row above the headings, such as heads of several columns. */
  over?: (columns: readonly Column<Row>[]) => ComponentChildren;
  /** Rows below the others, such as sums, of the columns that are shown. */
  foot?: (columns: readonly Column<Row>[]) => ComponentChildren;
  empty?: ComponentChildren;
}

const features = tableFeatures({ columnVisibilityFeature, rowSortingFeature, sortedRowModel: createSortedRowModel() });

/** The names of the columns that the address asks for, in their own order; those that are no extras without it. */
export function shownColumns<Row>(columns: readonly Column<Row>[], asked: string | null): readonly Column<Row>[] {
  const wanted = asked?.split(",");
  const found = columns.filter((column) => (wanted ? wanted.includes(column.id) : !column.isExtra));
  return found.length ? found : columns.filter((column) => !column.isExtra);
}

function useAsked(name: string): { sort: string; columns: string | null; key: (key: string) => string } {
  const { query } = usePlace();
  const key = (each: string) => (name ? `${name}.${each}` : each);
  return { sort: query.get(key("sort")) ?? "", columns: query.get(key("columns")), key };
}

/** Checkboxes of a table's columns, in a menu. */
export function ColumnMenu<Row>({ name = "", columns }: { name?: string; columns: readonly Column<Row>[] }) {
  const asked = useAsked(name);
  const shown = shownColumns(columns, asked.columns);
  const turn = (column: Column<Row>) => {
    const next = columns.filter((each) => (each === column ? !shown.includes(each) : shown.includes(each)));
    const isUsual = columns.every((each) => next.includes(each) === !each.isExtra);
    if (next.length) amend({ [asked.key("columns")]: isUsual ? null : next.map((each) => each.id).join(",") });
  };
  return (
    <details class="menu">
      <summary>Columns</summary>
      <div>
        {columns.map((column) => (
          <label key={column.id}>
            <input type="checkbox" checked={shown.includes(column)} disabled={shown.length === 1 && shown.includes(column)} onChange={() => turn(column)} /> {column.title}
          </label>
        ))}
        {asked.columns !== null && (
          <button class="link small" onClick={() => amend({ [asked.key("columns")]: null })}>
            Usual columns
          </button>
        )}
      </div>
    </details>
  );
}

export function Table<Row>({ name = "", label, columns, rows, idOf, isServers = false, open, instead, rowClass, onRow, onChosen, over, foot, empty, ...rest }: Props<Row>) {
  const asked = useAsked(name);
  const shown = shownColumns(columns, asked.columns);
  const byId = new Map(columns.map((column) => [column.id, column]));
  const defs = useMemo(
    () =>
      columns.map((column) => ({
        id: column.id,
        accessorFn: (row: Row) => (typeof column.value === "function" ? (column.value(row) ?? undefined) : undefined),
        enableSorting: column.value !== undefined,
        sortFn: compare,
        sortUndefined: "last" as const,
        sortDescFirst: false,
      })),
    [columns.map((column) => column.id).join()],
  );
  const sorting = useMemo(() => sortingOf(asked.sort, byId), [asked.sort]);
  const visibility = useMemo(() => Object.fromEntries(columns.map((column) => [column.id, shown.includes(column)])), [shown.map((column) => column.id).join()]);
  const data = useMemo(() => [...rows], [rows]);
  const table = useTable<typeof features, Row & object>({
    features,
    columns: defs as never,
    data: data as (Row & object)[],
    getRowId: (row, index) => idOf(row, index),
    state: { sorting, columnVisibility: visibility },
    manualSorting: isServers,
    enableMultiSort: false,
    onSortingChange: (update) => {
      const [first] = typeof update === "function" ? update(sorting) : update;
      amend({ [asked.key("sort")]: first ? `${first.desc ? "-" : ""}${first.id}` : null });
    },
  });
  const lines = table.getRowModel().rows;
  const [own, setOwn] = useState(-1);
  const chosen = onChosen ? lines.findIndex((line) => line.id === rest.chosen) : own;
  const move = (by: number) => {
    const to = Math.max(0, Math.min(lines.length - 1, chosen + by));
    if (!onChosen) setOwn(to);
    else if (lines[to]) onChosen(lines[to].id);
  };
  const steps = [
    { keys: "j", does: "next row", run: () => move(1) },
    { keys: "k", does: "row before", run: () => move(-1) },
  ];
  const opens = { keys: "Enter", does: "open the row", run: () => lines[chosen] && open?.(lines[chosen].original) };
  useKeys([...(open || onChosen ? steps : []), ...(open ? [opens] : [])]);
  if (rows.length === 0 && empty !== undefined) return <>{empty}</>;
  return (
    <div class="scroll">
      <table class={rest.class ?? ""} aria-label={label}>
        <thead>
          {over?.(shown)}
          {table.getHeaderGroups().map((group) => (
            <tr key={group.id}>
              {group.headers.map(({ id, column }) => {
                const { title = "", kind = "", about } = byId.get(column.id) ?? {};
                const help = about && (
                  <>
                    {" "}
                    <Explained words={about} kind="help" label="what this is">
                      ?
                    </Explained>
                  </>
                );
                if (!column.getCanSort()) return <th key={id} class={kind}>{title}{help}</th>;
                const order = column.getIsSorted();
                return (
                  <th key={id} class={kind} aria-sort={order === "asc" ? "ascending" : order === "desc" ? "descending" : "none"}>
                    <Sorter title={title} mark={order === "asc" ? " ↑" : order === "desc" ? " ↓" : ""} turn={() => column.toggleSorting()} />
                    {help}
                  </th>
                );
              })}
            </tr>
          ))}
        </thead>
        <tbody>
          {lines.map((line, index) => {
            const row = line.original;
            const other = instead?.(row) ?? null;
            const isChosen = index === chosen;
            const classes = [isChosen ? "chosen" : "", rowClass?.(row) ?? ""].filter(Boolean).join(" ");
            return (
              <tr key={line.id} class={classes} {...(isChosen ? { "aria-selected": true } : {})} {...(onRow ? { onClick: () => onRow(row) } : {})}>
                {other !== null ? <td colSpan={shown.length}>{other}</td> : line.getVisibleCells().map((cell) => <Cell key={cell.column.id} column={byId.get(cell.column.id)} row={row} />)}
              </tr>
            );
          })}
        </tbody>
        {foot && <tfoot>{foot(shown)}</tfoot>}
      </table>
    </div>
  );
}

function Cell<Row>({ column, row }: { column: Column<Row> | undefined; row: Row }) {
  if (!column) return null;
  const tip = column.tip?.(row);
  return (
    <td class={[column.kind, column.paint?.(row)].filter(Boolean).join(" ")} {...(tip ? { title: tip } : {})}>
      {column.cell(row)}
    </td>
  );
}

function Sorter({ title, mark, turn }: { title: ComponentChildren; mark: string; turn: () => void }) {
  return (
    <a class="sorter" role="button" tabIndex={0} onClick={turn} onKeyDown={(event) => event.key === "Enter" && (event.stopPropagation(), turn())}>
      {title}
      {mark}
    </a>
  );
}

function sortingOf(sort: string, columns: ReadonlyMap<string, Column<never>>): SortingState {
  const id = sort.replace(/^-/, "");
  return columns.get(id)?.value === undefined ? [] : [{ id, desc: sort.startsWith("-") }];
}

interface Valued {
  getValue: (id: string) => unknown;
}

/** Numbers by size; words by the alphabet, and numbers in them by size. */
function compare(a: Valued, b: Valued, id: string): number {
  const [x, y] = [a.getValue(id), b.getValue(id)];
  if (typeof x === "number" && typeof y === "number") return x - y;
  return String(x).localeCompare(String(y), "en", { numeric: true });
}
