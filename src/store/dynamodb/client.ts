import type { Millis } from '../../core/record.ts'
import { within } from '../../runtime/scheduling.ts'
import { PartlyUnavailable, SOUND, type StoreTraits, StoreUnavailable } from '../register.ts'

/** An optional peer dependency, so there are no types to rely on. */
const SDK: string = '@aws-sdk/client-dynamodb'
/** The store's clock has a resolution of one second: an uncertainty of a second plus network latency is normal. */
const MAX_DOUBT: Millis = 5000
/** Only the latest replies say something about the clocks. */
const REMEMBERED = 100
/** Covers the first connection and the provider of credentials. */
const PREPARE_TIMEOUT: Millis = 5000
/** No connection, so nothing was sent. */
const NOT_SENT = ['ECONNREFUSED', 'ENOTFOUND', 'EAI_AGAIN', 'EHOSTUNREACH', 'ENETUNREACH']
/** One partition is busy, or another write to the same item is in progress: other records are still served. */
const BUSY = [
  'ProvisionedThroughputExceededException',
  'RequestLimitExceeded',
  'ThrottlingException',
  'TransactionConflictException',
  'ReplicatedWriteConflictException',
]

export type AttributeValue = { readonly S: string } | { readonly N: string } | { readonly B: Uint8Array }
export type Item = Readonly<Record<string, AttributeValue>>
export type OperationInput = Readonly<Record<string, unknown>>

/** The fields read from all answers. */
export interface OperationOutput {
  readonly Item?: Item
  /** The item before the write. */
  readonly Attributes?: Item
  readonly Items?: readonly Item[]
  readonly LastEvaluatedKey?: Item
  readonly Table?: TableDescription
  readonly TimeToLiveDescription?: { readonly TimeToLiveStatus?: string; readonly AttributeName?: string }
}
interface KeyElement {
  readonly AttributeName?: string
}
export interface TableDescription {
  readonly KeySchema?: readonly KeyElement[]
  readonly GlobalSecondaryIndexes?: readonly {
    readonly IndexName?: string
    readonly KeySchema?: readonly KeyElement[]
  }[]
  readonly Replicas?: readonly { readonly RegionName?: string }[]
  readonly MultiRegionConsistency?: string
}
export type DynamoDbOperation =
  | 'GetItem'
  | 'PutItem'
  | 'UpdateItem'
  | 'DeleteItem'
  | 'Query'
  | 'Scan'
  | 'DescribeTable'
  | 'DescribeTimeToLive'

interface Sdk {
  readonly DynamoDBClient: new (options: object) => SdkClient
  readonly [command: `${string}Command`]: new (input: OperationInput) => object
}
interface SdkClient {
  send(command: object, options: { readonly abortSignal: AbortSignal }): Promise<OperationOutput>
  destroy(): void
  readonly middlewareStack: { add(middleware: Middleware, options: object): void }
}
type Middleware = (next: (args: unknown) => Promise<Exchanged>) => (args: unknown) => Promise<Exchanged>
interface Exchanged {
  readonly response: { readonly headers: Readonly<Record<string, string>> }
}
interface SdkError extends Error {
  readonly code?: string
  readonly Item?: Item
  readonly $metadata?: { readonly httpStatusCode?: number }
}

/** The condition of a write did not hold. */
export class ConditionFailed extends Error {
  /** The existing item, if the server returned it. */
  readonly item: Item | null
  constructor(item: Item | null) {
    super('the condition does not hold')
    this.item = item
  }
}

/** The table does not exist. */
export class NoTable extends StoreUnavailable {}

/** An estimate of the store's clock, between two bounds. */
export interface Clock {
  /** A reply whose `Date` was `date`, sent and received at these times of this process. */
  saw(date: Millis, sent: Millis, received: Millis): void
  /** @throws {StoreUnavailable} while it is too uncertain. */
  earliest(): Millis
  /** @throws {StoreUnavailable} like {@link earliest}. */
  latest(): Millis
}

/** Offsets to this process's clock. */
interface Bounds {
  readonly from: Millis
  readonly to: Millis
}
const UNBOUNDED: Bounds = { from: Number.NEGATIVE_INFINITY, to: Number.POSITIVE_INFINITY }

/**
 * Expressions have no clock, so it is estimated from the `Date` of the replies, which counts seconds, and advances monotonically in
 * between: a record written with a wrong time could vanish at once.
 */
export class ServerClock implements Clock {
  readonly #local: () => Millis
  #before = UNBOUNDED
  #since = UNBOUNDED
  #seen = 0

  constructor(local: () => Millis = () => performance.now()) {
    this.#local = local
  }

  saw(date: Millis, sent: Millis, received: Millis): void {
    const one = { from: date - received, to: date + 1000 - sent }
    if (Number.isNaN(one.from)) return
    this.#since = both(this.#since, one)
    const { from, to } = this.#bounds()
    // The server's clock was set, or this machine slept: earlier estimates are worthless.
    if (from > to) [this.#before, this.#since] = [one, one]
    if (++this.#seen % REMEMBERED === 0) [this.#before, this.#since] = [this.#since, UNBOUNDED]
  }

  earliest(): Millis {
    return Math.floor(this.#local() + this.#known().from)
  }

  latest(): Millis {
    return Math.ceil(this.#local() + this.#known().to)
  }

  #bounds(): Bounds {
    return both(this.#before, this.#since)
  }

  #known(): Bounds {
    const bounds = this.#bounds()
    const doubt = bounds.to - bounds.from
    if (doubt <= MAX_DOUBT) return bounds
    const found = Number.isFinite(doubt) ? `is uncertain by ${doubt} ms` : 'is unknown'
    throw new StoreUnavailable(
      `the time of the DynamoDB store ${found}; allowed: ${MAX_DOUBT} ms, by the Date of its replies`,
      false,
    )
  }
}

function both(a: Bounds, b: Bounds): Bounds {
  return { from: Math.max(a.from, b.from), to: Math.min(a.to, b.to) }
}

export interface ClientOptions {
  readonly table: string
  /** Without `region` or `endpoint`, the SDK uses `AWS_REGION` or a profile. */
  readonly where: Readonly<Record<string, string>>
  readonly timeoutMs: Millis
  readonly clock: Clock
  readonly onEvent: (kind: 'connected' | 'disconnected' | 'error', detail: string) => void
}

/** Operations on one table, each sent once: the SDK retries nothing. */
export class Client {
  readonly #options: ClientOptions
  readonly #sdk: Sdk
  readonly #client: SdkClient
  #isUp = false

  /** @throws {StoreUnavailable} if the SDK is not installed. */
  static async load(options: ClientOptions): Promise<Client> {
    const sdk: Sdk = await import(SDK).catch((cause: Error) => {
      const message = `cannot use the DynamoDB store: the package ${SDK} is not installed beside the proxy; npm install ${SDK}@3 (${cause.message})`
      throw new StoreUnavailable(message, false, { cause })
    })
    return new Client(options, sdk)
  }

  private constructor(options: ClientOptions, sdk: Sdk) {
    const { where, clock } = options
    this.#options = options
    this.#sdk = sdk
    this.#client = new sdk.DynamoDBClient({ maxAttempts: 1, ...where })
    const observed: Middleware = (next) => async (args) => {
      const sent = performance.now()
      const exchanged = await next(args)
      clock.saw(Date.parse(String(exchanged.response.headers['date'])), sent, performance.now())
      return exchanged
    }
    // Closest to the connection: credentials are already resolved, errors not yet parsed.
    this.#client.middlewareStack.add(observed, { step: 'deserialize', priority: 'low' })
  }

  /**
   * @throws {ConditionFailed} if the condition does not hold.
   * @throws {StoreUnavailable}
   */
  async run(
    operation: DynamoDbOperation,
    input: OperationInput,
    timeoutMs = this.#options.timeoutMs,
  ): Promise<OperationOutput> {
    const Command = this.#sdk[`${operation}Command`] as Sdk[`${string}Command`]
    const abort = new AbortController()
    try {
      const sent = this.#client.send(new Command({ TableName: this.#options.table, ...input }), {
        abortSignal: abort.signal,
      })
      const answer = await within(timeoutMs, sent)
      if (answer === null) {
        abort.abort()
        throw new StoreUnavailable(`DynamoDB did not answer within ${timeoutMs} ms`, true)
      }
      this.#heard()
      return answer
    } catch (error) {
      throw this.#failed(operation, error as SdkError)
    }
  }

  /** @throws {NoTable}, or {@link StoreUnavailable}, which may pass. */
  async describe(): Promise<TableDescription> {
    const { Table } = await this.run('DescribeTable', {}, PREPARE_TIMEOUT)
    return Table ?? {}
  }

  close(): void {
    this.#client.destroy()
  }

  #heard(): void {
    if (!this.#isUp) this.#options.onEvent('connected', `table ${this.#options.table}`)
    this.#isUp = true
  }

  #failed(operation: DynamoDbOperation, error: SdkError): Error {
    const status = error.$metadata?.httpStatusCode
    if (status === undefined || status >= 500) {
      if (this.#isUp) this.#options.onEvent('disconnected', error.message)
      this.#isUp = false
    } else this.#heard()
    if (error instanceof StoreUnavailable) return error
    if (error.name === 'ConditionalCheckFailedException') return new ConditionFailed(error.Item ?? null)
    const message = `DynamoDB, ${operation}: ${error.name}: ${error.message}`
    const cause = { cause: error }
    if (BUSY.includes(error.name)) return new PartlyUnavailable(message, false, cause)
    if (error.name === 'ResourceNotFoundException') return new NoTable(message, false, cause)
    const isUnsent = NOT_SENT.includes(error.code ?? '') || error.name === 'CredentialsProviderError'
    // A truncated answer has status 200.
    const isDenied = status !== undefined && status >= 400 && status < 500
    return new StoreUnavailable(message, !isUnsent && !isDenied, cause)
  }
}

/** What a table promises, and what it lacks. */
export function tableTraits(
  { Replicas = [], MultiRegionConsistency }: TableDescription,
  { TimeToLiveStatus, AttributeName }: NonNullable<OperationOutput['TimeToLiveDescription']>,
): StoreTraits {
  const findings: string[] = []
  const isUnfit = Replicas.length > 0 && MultiRegionConsistency !== 'STRONG'
  if (isUnfit)
    findings.push(
      'The table is global without MultiRegionConsistency STRONG: two regions can claim the same key, and both execute.',
    )
  if (TimeToLiveStatus !== 'ENABLED' || AttributeName !== 'e')
    findings.push('Time to live is off for the attribute e: expired records are never removed.')
  // The last writer wins: the other claim is lost.
  return { ...SOUND, evicts: isUnfit, findings }
}
