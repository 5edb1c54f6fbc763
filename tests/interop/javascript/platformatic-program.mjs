// @platformatic/kafka as a member of a group, or as a producer; tests/interop/programs.py says how
// it behaves.

import { Consumer, PATIENT, Producer, options } from './platformatic-client.mjs'
import { Held, over, say, sendNumbers, told } from './program.mjs'

const { address, topic } = told

const held = new Held()
let leaves = false

// When its broker is lost, the client repeats what it had begun, a commit for instance, also when
// it has lost its member's id meanwhile. So a member whose client has any trouble takes another.
async function member() {
  over.then(() => { leaves = true })
  while (!leaves) {
    const life = new Life()
    try {
      await Promise.race([over, life.read(), life.trouble])
    } catch (error) {
      life.abandon()
      held.revoke()
      await new Promise(resolve => setTimeout(resolve, 100))
      continue
    }
    held.revoke()
    await life.leave()
  }
}

class Life {
  #stream = null
  #streams = 0

  constructor() {
    this.consumer = new Consumer({
      ...options(address),
      groupId: told.group,
      groupInstanceId: told.instance ?? undefined,
      sessionTimeout: told.session_ms,
      rebalanceTimeout: told.session_ms,
      heartbeatInterval: told.heartbeat_ms,
      autocommit: false,
      // Some records at a time, so that the machine has time for others, too.
      minBytes: 4096,
      maxWaitTime: 50,
      retries: 2,
      retryDelay: 100
    })
    this.consumer.on('consumer:group:rebalance', () => this.#isOn() && held.revoke())
    this.consumer.on('consumer:group:join', ({ assignments }) => this.#joined(assignments))
    this.trouble = new Promise((_, reject) => {
      this.fail = reject
      this.consumer.on('error', reject)
      this.consumer.on('consumer:heartbeat:error', ({ error }) => reject(error))
    })
  }

  // A stream goes on with what it fetched before a rebalance and drops nothing of it, so each
  // generation gets a stream of its own. The old one is closed last: with it the topic would go.
  async read() {
    const old = this.#stream
    const number = ++this.#streams
    const wanted = { topics: [topic], mode: 'committed', fallbackMode: 'earliest' }
    const stream = this.#stream = await this.consumer.consume(wanted)
    old?.close().catch(this.fail)
    let next = new Map()
    for await (const { partition, offset, value } of stream) {
      if (number !== this.#streams || !this.#isOn()) break
      if (!held.has(partition)) continue
      say('record', [partition], { offset: Number(offset), value: String(value) })
      next.set(partition, offset + 1n)
      if (stream.readableLength === 0 || Number(offset) % 20 === 0) {
        await this.#commit(next)
        next = new Map()
      }
    }
    // What comes after it decides what becomes of this life.
    await new Promise(() => {})
  }

  async #commit(next) {
    const place = ([partition, offset]) => ({ topic, partition, offset, leaderEpoch: -1 })
    try {
      await this.consumer.commit({ offsets: [...next].map(place) })
    } catch (error) {
      // The group rebalances: joining again is the client's business.
      if (error.findBy?.('needsRejoin', true)) return
      throw error
    }
    for (const [partition, offset] of next) {
      say('committed', [partition], { offset: Number(offset) })
    }
  }

  #joined(assignments) {
    if (!this.#isOn()) return
    held.assign(assignments.find(one => one.topic === topic)?.partitions ?? [])
    if (this.#stream) this.read().catch(this.fail)
  }

  #isOn() {
    return !leaves && !this.abandoned
  }

  abandon() {
    this.abandoned = true
    this.consumer.close(true).catch(() => {})
  }

  leave() {
    return this.consumer.close(true)
  }
}

async function producer() {
  const client = new Producer({ ...options(address), ...PATIENT, idempotent: true })
  const toMessage = value => ({ topic, partition: 0, value: Buffer.from(value) })
  await sendNumbers(values => client.send({ messages: values.map(toMessage) }))
  await client.close()
}

await { member, producer }[told.role]()
process.exit(0)
