import type { Method } from 'protobufjs'
import protobuf from 'protobufjs'
import descriptor, { type IFileDescriptorSet } from 'protobufjs/ext/descriptor.js'

/** A method of a service. */
export interface RpcMethod {
  /** `package.Service/Method` */
  readonly name: string
  readonly streams: 'none' | 'client' | 'server' | 'both'
  /** As its author declares it (`idempotency_level`). */
  readonly safety: 'unknown' | 'no side effects' | 'idempotent'
  /** The JSON names of its request's fields. */
  readonly fields: readonly string[]
  /** The request as JSON, close to protobuf's own mapping; null: it cannot be decoded as this method's request. */
  jsonOf(message: Buffer): string | null
}

/** A decoded `FileDescriptorSet`. */
export interface Descriptors {
  /** The content of its file. */
  readonly bytes: Buffer
  readonly methods: ReadonlyMap<string, RpcMethod>
}

export type DescriptorsReading =
  | { readonly kind: 'descriptors'; readonly descriptors: Descriptors }
  | { readonly kind: 'refused'; readonly why: string }

/** Reads what `protoc --include_imports --descriptor_set_out` or `buf build` writes. */
export function readDescriptors(bytes: Buffer): DescriptorsReading {
  try {
    const set = descriptor.FileDescriptorSet.decode(bytes) as unknown as IFileDescriptorSet
    const root = protobuf.Root.fromDescriptor(set)
    root.resolveAll()
    const methods = new Map<string, RpcMethod>()
    collect(root, methods)
    return { kind: 'descriptors', descriptors: { bytes, methods } }
  } catch (error) {
    return { kind: 'refused', why: (error as Error).message }
  }
}

function collect(namespace: protobuf.NamespaceBase, methods: Map<string, RpcMethod>): void {
  for (const one of namespace.nestedArray)
    if (one instanceof protobuf.Service)
      for (const method of one.methodsArray) {
        const name = `${one.fullName.slice(1)}/${method.name}`
        methods.set(name, methodOf(name, method))
      }
    else if (one instanceof protobuf.Namespace) collect(one, methods)
}

/** An `Any` is not expanded: its type may be unknown here. */
const AS_JSON = { longs: String, enums: String, bytes: String, json: true }

const STREAMS = { '': 'none', request: 'client', response: 'server', 'request response': 'both' } as const
const SAFETY: Readonly<Record<string, RpcMethod['safety']>> = {
  NO_SIDE_EFFECTS: 'no side effects',
  IDEMPOTENT: 'idempotent',
}

function methodOf(name: string, method: Method): RpcMethod {
  const { requestStream, responseStream, options } = method
  const type = method.resolvedRequestType as protobuf.Type
  const streams = [...(requestStream ? ['request'] : []), ...(responseStream ? ['response'] : [])].join(' ')
  return {
    name,
    streams: STREAMS[streams as keyof typeof STREAMS],
    safety: SAFETY[String(options?.idempotencyLevel ?? options?.idempotency_level)] ?? 'unknown',
    fields: type.fieldsArray.map((field) => protobuf.util.camelCase(field.name)),
    jsonOf(message) {
      try {
        return JSON.stringify(type.toObject(type.decode(message), AS_JSON))
      } catch {
        return null
      }
    },
  }
}
