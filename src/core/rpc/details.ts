/*
 * The messages of google/rpc/status.proto and error_details.proto that this proxy sends, in protobuf's encoding: fields that are empty are
 * left out.
 */

/** A value of `google.rpc.Status.details`. */
export type RpcDetail =
  | {
      readonly type: 'ErrorInfo'
      readonly reason: string
      readonly domain: string
      readonly metadata: Readonly<Record<string, string>>
    }
  | { readonly type: 'RetryInfo'; readonly seconds: number }
  | { readonly type: 'BadRequest'; readonly field: string; readonly description: string }

/** `google.rpc.Status`. */
export function statusMessage(code: number, message: string, details: readonly RpcDetail[]): Buffer {
  const any = (detail: RpcDetail): Buffer =>
    Buffer.concat([text(1, `type.googleapis.com/${detailName(detail)}`), bytes(2, detailMessage(detail))])
  return Buffer.concat([number(1, code), text(2, message), ...details.map((one) => bytes(3, any(one)))])
}

export function detailName({ type }: RpcDetail): string {
  return `google.rpc.${type}`
}

export function detailMessage(detail: RpcDetail): Buffer {
  switch (detail.type) {
    case 'ErrorInfo': {
      const entries = Object.entries(detail.metadata).map(([name, value]) =>
        bytes(3, Buffer.concat([text(1, name), text(2, value)])),
      )
      return Buffer.concat([text(1, detail.reason), text(2, detail.domain), ...entries])
    }
    case 'RetryInfo':
      return bytes(1, number(1, detail.seconds))
    case 'BadRequest':
      return bytes(1, Buffer.concat([text(1, detail.field), text(2, detail.description)]))
  }
}

const VARINT = 0
const LENGTH_DELIMITED = 2

function number(field: number, value: number): Buffer {
  return value === 0 ? NOTHING : Buffer.from([...varint((field << 3) | VARINT), ...varint(value)])
}

function text(field: number, value: string): Buffer {
  return value === '' ? NOTHING : bytes(field, Buffer.from(value))
}

function bytes(field: number, value: Buffer): Buffer {
  return Buffer.concat([
    Buffer.from([...varint((field << 3) | LENGTH_DELIMITED), ...varint(value.length)]),
    value,
  ])
}

const NOTHING = Buffer.alloc(0)

/** For non-negative integers only. */
function varint(value: number): number[] {
  const out: number[] = []
  let left = value
  for (; left >= 0x80; left = Math.floor(left / 0x80)) out.push((left % 0x80) | 0x80)
  return [...out, left]
}
