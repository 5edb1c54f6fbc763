// A client of Kafka, driven by lines of JSON; tests/interop/driver.py has the other end.
//
// A line on stdin is a command, {"id": 1, "do": "send", ...}; its answer on stdout is
// {"id": 1, "gives": ...} or {"id": 1, "fails": {"name": ..., "text": ...}}. Commands run at the
// same time. Producers, consumers and admins are known by the number that the command gave which
// opened them. The end of stdin is the end of all.

import { createInterface } from 'node:readline'

// Open clients by number; each has `close`, and what its kind needs.
const opened = new Map()

// `client` says how to open each kind of client: {producer, consumer, admin}, each a function of an
// address and settings. An opened one has `close`, and for each of the commands a function: `send`
// for a producer, `assign` for a consumer, and `client`, whose own methods `method` calls. A producer
// that writes transactions has the steps of one in `transactions`.
export async function serve(client) {
  const commands = {
    close,
    take: ({ consumer, count, wait_ms }) => opened.get(consumer).inbox.take(count, wait_ms),
    send: ({ producer, topic, records }) => opened.get(producer).send(topic, records.map(toRecord)),
    assign: ({ consumer, partitions }) => opened.get(consumer).assign(partitions),
    subscribe: ({ consumer, topics }) => opened.get(consumer).subscribe(topics),
    init_transactions: ({ producer }) => opened.get(producer).transactions.init(),
    begin: ({ producer }) => opened.get(producer).transactions.begin(),
    send_offset: ({ producer, group, topic, offset }) =>
      opened.get(producer).transactions.sendOffset(group, topic, offset),
    commit_transaction: ({ producer }) => opened.get(producer).transactions.commit(),
    abort: ({ producer }) => opened.get(producer).transactions.abort(),
    method
  }
  for (const kind of ['producer', 'consumer', 'admin']) {
    commands[kind] = async ({ address, settings }) =>
      keep(await client[kind](address, fromJson(settings)))
  }
  for await (const line of createInterface({ input: process.stdin })) {
    const command = JSON.parse(line)
    answer(command, commands[command.do])
  }
  // Nobody is left to close anything for.
  process.exit(0)
}

async function answer(command, run) {
  let said
  try {
    said = { gives: (await run(command)) ?? null }
  } catch (error) {
    said = { fails: { name: nameOf(error), text: String(error?.message) } }
  }
  process.stdout.write(JSON.stringify({ id: command.id, ...said }, toJson) + '\n')
}

function keep(client) {
  const number = opened.size + 1
  opened.set(number, client)
  return number
}

async function close({ number }) {
  const client = opened.get(number)
  opened.set(number, undefined)
  await client?.close()
}

// A method of the client itself, with its own arguments.
async function method({ producer, consumer, admin, name, given }) {
  const { client } = opened.get(producer ?? consumer ?? admin)
  return await client[name](...given.map(fromJson))
}

// Records that came, in the order in which they did, for whoever takes them.
export class Inbox {
  #records = []
  #failure = null
  #changed = () => {}

  push(record) {
    this.#records.push(record)
    this.#changed()
  }

  fail(error) {
    this.#failure = error
    this.#changed()
  }

  // So many, or as many as came in time.
  async take(count, waitMs) {
    let late = false
    const timer = setTimeout(() => { late = true; this.#changed() }, waitMs)
    while (this.#records.length < count && !late && !this.#failure) {
      await new Promise(resolve => { this.#changed = resolve })
    }
    clearTimeout(timer)
    if (this.#failure) throw this.#failure
    return this.#records.splice(0, count)
  }
}

// --- values in JSON ------------------------------------------------------------------------------

// Bytes are strings whose characters are the bytes; null is null.
export const bytes = text => (text == null ? null : Buffer.from(text, 'latin1'))
export const text = bytes => (bytes == null ? null : Buffer.from(bytes).toString('latin1'))

function toRecord({ value, key, headers, ...more }) {
  const pairs = (headers ?? []).map(([name, value]) => [name, bytes(value)])
  return { value: bytes(value), key: bytes(key), headers: pairs, ...more }
}

// What JSON has no word for: {"bigint": 5}.
function fromJson(value) {
  if (Array.isArray(value)) return value.map(fromJson)
  if (value === null || typeof value !== 'object') return value
  if ('bigint' in value) return BigInt(value.bigint)
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, fromJson(one)]))
}

function toJson(name, value) {
  if (typeof value === 'bigint') return Number(value)
  if (value instanceof Map) return Object.fromEntries(value)
  if (value?.type === 'Buffer' && Array.isArray(value.data)) return text(value.data)
  return value
}

// The innermost name that says something: clients wrap what the broker said.
function nameOf(error) {
  const inner = error?.errors?.[0] ?? (error?.groups ?? error?.partitions)?.[0]?.error ?? error?.cause
  if (inner) return nameOf(inner)
  return error?.type ?? error?.apiId ?? error?.code ?? error?.name
}
