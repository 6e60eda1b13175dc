// The binary answers of the timeline, as columns over the bytes that came: nothing is copied.
//
//   u32 length │ JSON header, padded to 8 │ planes or columns, little endian

export const NO_PIPELINE = 65535;
export const NO_CAUSE = 255;

/** Buckets of one level: parts of 255 of each bucket, device by device. */
export interface Tiles {
  level: number;
  bucket_s: number;
  first_bucket: number;
  num_buckets: number;
  num_devices: number;
  busy: Uint8Array;
  switched: Uint8Array;
  bubble: Uint8Array;
  /** Place in the list of causes; 255 where the bucket is all work. */
  cause: Uint8Array;
  /** Pipeline that computed or switched most; 65535 where none did. */
  top: Uint16Array;
}

/** Intervals, by device, then start. */
export interface Intervals {
  t0: number;
  t1: number;
  count: number;
  start: Float64Array;
  seconds: Float64Array;
  device: Uint16Array;
  pipeline: Uint16Array;
  cause: Uint8Array;
  stage: Uint8Array;
  lane: Uint8Array;
  flags: Uint8Array;
  step: Uint32Array;
  order: Uint32Array;
  fraction: Float32Array;
}

export const IS_OPEN = 1;

function headed(bytes: ArrayBuffer): { header: Record<string, any>; begin: number } {
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return { header, begin: 4 + length };
}

export function tilesOf(bytes: ArrayBuffer): Tiles {
  const { header, begin } = headed(bytes);
  const { level, bucket_s, first_bucket, num_buckets, num_devices } = header as Tiles;
  const size = num_buckets * num_devices;
  const plane = (index: number) => new Uint8Array(bytes, begin + index * size, size);
  return {
    ...{ level, bucket_s, first_bucket, num_buckets, num_devices },
    ...{ busy: plane(0), switched: plane(1), bubble: plane(2), cause: plane(3) },
    top: new Uint16Array(bytes, begin + 4 * size, size),
  };
}

const ARRAYS = { f64: Float64Array, f32: Float32Array, u8: Uint8Array, u16: Uint16Array, u32: Uint32Array } as const;

export function intervalsOf(bytes: ArrayBuffer): Intervals {
  const { header, begin } = headed(bytes);
  const columns = (header.columns as { name: string; type: keyof typeof ARRAYS; offset: number }[]).map(({ name, type, offset }) => [
    name,
    new ARRAYS[type](bytes, begin + offset, header.count),
  ]);
  return { t0: header.t0, t1: header.t1, count: header.count, ...Object.fromEntries(columns) };
}
