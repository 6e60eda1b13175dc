// Builds the pages: app.tsx and all it imports ──esbuild──▶ dist/{index.html, licences.txt, favicon.svg, assets/NAME-HASH.{js,css}}
//
// Names in assets carry a hash of the contents, so a browser may keep them for ever. dist appears whole or not at all.
import { cp, mkdir, readFile, readdir, rename, rm, writeFile } from "node:fs/promises";
import { basename, dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const pages = dirname(fileURLToPath(import.meta.url));
const root = join(pages, "..", "..", "..", "..");
const aside = join(pages, "dist.new");
const dist = join(pages, "dist");

await rm(aside, { recursive: true, force: true });
await mkdir(aside);
const result = await build({
  entryPoints: [join(pages, "app.tsx")],
  absWorkingDir: root,
  outdir: join(aside, "assets"),
  entryNames: "[name]-[hash]",
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome109", "firefox115", "safari16"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none", // licences.txt has them whole
  metafile: true,
  logLevel: "warning",
});

const outputs = Object.keys(result.metafile.outputs).map((path) => `assets/${basename(path)}`);
const html = await readFile(join(pages, "index.html"), "utf8");
const links = [
  ...outputs.filter((name) => name.endsWith(".css")).map((name) => `<link rel="stylesheet" href="/${name}">`),
  ...outputs.filter((name) => name.endsWith(".js")).map((name) => `<script type="module" src="/${name}"></script>`),
];
await writeFile(join(aside, "index.html"), html.replace("<!-- assets -->", links.join("\n    ")));
await cp(join(pages, "favicon.svg"), join(aside, "favicon.svg"));
await writeFile(join(aside, "licences.txt"), await licences(Object.keys(result.metafile.inputs)));

await rm(dist, { recursive: true, force: true });
await rename(aside, dist);
const kib = Object.values(result.metafile.outputs).reduce((sum, file) => sum + file.bytes, 0) / 1024;
console.log(`pages: ${outputs.length} files, ${kib.toFixed(0)} KiB, in ${relative(root, dist)}`);

/** Name, version and licence text of every package whose code is in the bundle. */
async function licences(inputs) {
  const folders = new Set(inputs.flatMap((path) => path.match(/^node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0] ?? []));
  const texts = [];
  for (const folder of [...folders].sort()) {
    const { name, version, license } = JSON.parse(await readFile(join(root, folder, "package.json"), "utf8"));
    const file = (await readdir(join(root, folder))).find((each) => /^licen[cs]e/i.test(each));
    if (!file) throw new Error(`${folder}: no licence file; what the pages carry must have one`);
    texts.push(`${name} ${version} (${license})\n\n${await readFile(join(root, folder, file), "utf8")}`);
  }
  return texts.join(`\n${"-".repeat(80)}\n\n`);
}
