// What the service answers, as docs/service.md lists it. Seconds are of the run's clock; what does not exist is null.

export type Kind = "busy" | "switch" | "bubble" | "idle";
export const KINDS: readonly Kind[] = ["busy", "switch", "bubble", "idle"];

/** Who asks. */
export interface Who {
  user: string;
  scopes: string[];
  role: string;
}

/** One request of the audit. */
export interface Request {
  at: string;
  user: string;
  by: string;
  token: string;
  address: string;
  method: string;
  path: string;
  status: number | null;
  left_out: number;
}

export interface Page<T> {
  items: T[];
  next: string | null;
}

export interface Lane {
  name: string;
  state: "running" | "not_answering" | "stopped" | "over";
  policy: string | null;
  backend: string | null;
  created: string | null;
  rlmux_version: string | null;
  start_s: number;
  now_s: number;
  is_indexing: boolean;
  is_going_on: boolean;
  /** A lane of a service: files may be submitted to it. */
  takes_submissions: boolean;
  seq: number;
  index_seq: number;
  index_lag_s: number | null;
  makespan_s: number;
  num_devices: number;
  pipelines: Record<string, number>;
  seconds: Record<Kind, number>;
  num_switches: number;
  num_migrations: number;
  control_overhead: number | null;
  slo_attainment: number | null;
  charges: Charge[];
  banner: string | null;
}

/** A lane whose log has not been read yet. */
export interface NewLane {
  name: string;
  state: "unknown";
  banner: string | null;
  is_indexing: boolean;
  takes_submissions: boolean;
}

/** Device-seconds with one name; `share` of all there were. */
export interface Charge {
  kind: Kind;
  cause: string;
  pipeline: string | null;
  label: string;
  seconds: number;
  share: number;
}

/** Something that is wrong now, by a rule of the report's table. */
export interface Alert {
  rule: string;
  level: "critical" | "warning" | "info";
  pipeline: string | null;
  step: number | null;
  text: string;
  advice: string;
  /** Who has seen it, and when; null: it was not said. */
  acknowledged: { by: string; at: string } | null;
}

export interface Device {
  id: string;
  pool: string;
  node: number;
  kind: Kind | null;
  cause: string | null;
  label: string | null;
  pipeline: string | null;
  stage: string | null;
  step: number | null;
  since_s: number | null;
  seconds: Record<Kind, number>;
  utilization: number | null;
}

export interface Row {
  lane: string;
  name: string;
  status: string;
  reason: string;
  step: number;
  num_steps: number | null;
  doing: string | null;
  group: number | string | null;
  reward_first: number | null;
  reward_last: number | null;
  rewards: (number | null)[];
  step_slowdown: number | null;
  slo_slowdown: number | null;
  keeps_slo: boolean | null;
  promise: string | null;
  project: string;
  user: string;
  submitted_s: number | null;
  admitted_s: number | null;
  ended_s: number | null;
  tokens: number;
  step_s_mean: number | null;
  eta_s: number | null;
}

/** Seconds of a step's phases. */
export interface Phases {
  rollout_s: number;
  train_s: number;
}

export interface Detail extends Row {
  expected_slowdown: number | null;
  /** Probability with which a cycle of its group takes no longer than planned; null: none is stated. */
  slo_probability: number | null;
  /** Solo seconds that it is planned with beside others, and those that its steps take in the middle. */
  bound: Phases | null;
  estimate: Phases | null;
  slo_reason: string;
  weights_sha256: string | null;
  trajectories: number;
  seconds: Record<string, number>;
  waits: { cause: string; label: string; seconds: number }[];
  metrics: string[];
  has_log: boolean;
  has_samples: boolean;
  spec: string | null;
}

/** A pipeline that waits; `position` 0: it is held, and not offered room. */
export interface Waiting {
  pipeline: string;
  token: string;
  reason: string;
  position: number;
  num_waiting: number;
  waited_s: number;
  first: string | null;
  starts_s: number | null;
  /** Project that is charged; empty: none is said. */
  project: string;
  /** Its dominant share of late, and the fair one; null: nothing is counted. */
  share: number | null;
  fair_share: number | null;
  is_over_share: boolean;
}

/** One project and one user of it. Hours are of one device, by pool. */
export interface AccountRow {
  project: string;
  user: string;
  weight: number;
  guarantee: number;
  share: number;
  fair_share: number;
  is_over_share: boolean;
  device_hours: Record<string, number>;
  /** Those of long ago forgotten. */
  used_hours: Record<string, number>;
  device_hours_today: number;
  running: number;
  waiting: number;
  quota: { max_running: number | null; max_waiting?: number | null; max_devices: number | null; device_hours_a_day: number | null; max_usd_per_hour?: number | null; budget_usd?: number | null; budget_days?: number | null };
  /** Dollars of `device_hours`, at the pools' prices. */
  usd?: number | null;
  /** Dollars that the account of the quota was charged in the present period of its budget. */
  spent_usd?: number | null;
  /** When that begins anew, in seconds of the run's clock. */
  budget_begins_s?: number | null;
}

/** What users have used; no accounts where nothing is counted. */
export interface Usage {
  accounts: AccountRow[];
  at_s?: number;
  half_life_hours?: number;
  /** Hours for which devices were held: what all charges add up to. */
  held_hours?: Record<string, number>;
}

/** What a lane cost over time; `x`: end of each bucket. `sums`: of the whole run, in dollars or device-hours. */
export interface Cost {
  unit: "usd_per_hour" | "devices";
  x: number[];
  paid: number[];
  alone: number[];
  computing: number[];
  sums: { paid: number; alone: number; computing: number };
}

export interface Queue {
  now_s: number;
  items: Waiting[];
  upcoming: { pipeline: string; at_s: number }[];
}

/** Why one waits; `token` null: it does not. */
export interface Why extends Omit<Waiting, "token"> {
  status: string;
  token: string | null;
  would_start_now_if: { key: string; was: string | number; to: string | number }[];
}

/** A file that was submitted, and what became of each of its pipelines. */
export interface Submission {
  id: string;
  lane: string;
  source: string;
  state: "accepted" | "taken" | "refused" | "over_quota";
  reason: string | null;
  pipelines: { pipeline: string; outcome: string; reason?: string; rollout_nodes?: string[]; train_nodes?: string[]; at_s?: number }[];
  created: string;
}

/** Whether a file would be taken. `is_lane_asked`: false where the controller is away, and names may be in use. */
export interface Checked {
  lane: string;
  pipelines: { pipeline: string; num_steps: number }[];
  is_lane_asked: boolean;
  /** What is wrong with the file; null: nothing is. */
  wrong: { detail: string; line: number | null; accepted: string } | null;
}

/** A trajectory in a list: `start` is the beginning of its answer. */
export interface Found {
  step: number;
  prompt: number;
  sample: number;
  reward: number;
  advantage: number;
  stop: string;
  tokens: number;
  turns: number;
  first_version: number;
  last_version: number;
  start: string;
}

export interface SamplePage extends Page<Found> {
  first_step: number | null;
  last_step: number | null;
}

/** A token that the model sampled, with the rollout engine's log-prob and the weight version that made it. */
export interface Token {
  text: string;
  logprob: number;
  version: number;
}

export interface Sample extends Found {
  prompt_text: string;
  said: { role: "model" | "environment"; text: string; is_cut: boolean; tokens?: Token[] }[];
  group: { sample: number; reward: number; tokens: number; stop: string }[];
}

export interface Compared {
  items: [Row, Row];
  identity: { is_same_plan: boolean | null; num_compared: number; last_equal: number | null; first_other: number | null; says: string };
}

export interface Step {
  step: number;
  end_s: number;
  seconds: number;
  solo_s: number | null;
  slowdown: number | null;
  weights_checksum: string | null;
  weights_sha256: string | null;
  metrics: Record<string, number | null>;
  stages: Record<string, number>;
}

type Column = (number | null)[];

export interface Metrics {
  x: string;
  names: string[];
  series: Record<string, { x: Column; y: Column; min?: Column; max?: Column }>;
  steps: number;
}

export interface Timeline {
  lane: string;
  start_s: number;
  end_s: number;
  is_over: boolean;
  devices: { id: string; pool: string; node: number }[];
  pipelines: string[];
  causes: string[];
  kinds: Kind[];
  kind_by_cause: (Kind | number)[];
  stages: string[];
  rev: number;
  seq: number;
  open_from: number | null;
  bucket_s: number[];
  num_intervals: number;
  max_intervals: number;
  max_buckets: number;
}

export interface Measured {
  t0: number;
  t1: number;
  device_s: number;
  items: Charge[];
}

export interface Order {
  order: number;
  pipeline: string;
  step: number;
  stage: string;
  start_s: number;
  end_s: number | null;
  devices: string[];
}

export interface Gap {
  interval: { device: string; start_s: number; end_s: number; kind: Kind; label: string; is_open: boolean };
  before: Order | null;
  after: Order | null;
  pinned: { pipeline: string; doing: Order[]; next: Order | null }[];
}

export interface Happening {
  time_s: number;
  what: string;
  pipeline: string | null;
  device: string | null;
  text: string;
}

/** What a simulation says of one pipeline; seconds from the moment that was asked about. */
export interface Prediction {
  ends_s: number | null;
  queue_s: number | null;
  step_slowdown: number | null;
  slo_slowdown: number | null;
  keeps_slo: boolean | null;
  refused: string | null;
}

export interface Side {
  policy: string;
  pipelines: Record<string, Prediction>;
  makespan_s: number | null;
  mean_step_slowdown: number | null;
  max_step_slowdown: number | null;
  mean_queue_s: number | null;
  slo_attainment: number | null;
  cost_usd: number | null;
  cost_usd_per_hour: number | null;
}

/** A what-if question answered. */
export interface Answer {
  run: string;
  at_s: number;
  about: string;
  notes: string[];
  now: Side;
  then: Side;
  /** The same question as a command. */
  command: string;
}

/** How far earlier predictions of a lane were off, as parts of the seconds predicted. */
export interface Score {
  policies: string[];
  num_scored: number;
  median_error: number | null;
  worst_error: number | null;
}
