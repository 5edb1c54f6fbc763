// kafkajs as a member of a group, or as a producer; tests/interop/programs.py says how it behaves.

import { connect, PATIENT } from './kafkajs-client.mjs'
import { Held, over, pieces, say, sendNumbers, told } from './program.mjs'

const { address, topic } = told

async function member() {
  const consumer = connect(address, PATIENT).consumer({
    groupId: told.group,
    sessionTimeout: told.session_ms,
    heartbeatInterval: told.heartbeat_ms,
    // Some records at a time, so that the machine has time for others, too.
    minBytes: 4096,
    maxWaitTimeInMs: 50
  })
  const held = new Held()
  const { GROUP_JOIN, REBALANCING, CRASH } = consumer.events
  consumer.on(GROUP_JOIN, ({ payload }) => held.assign(payload.memberAssignment[topic] ?? []))
  consumer.on(REBALANCING, () => held.revoke())
  consumer.on(CRASH, ({ payload }) => { if (!payload.restart) throw payload.error })

  async function eachBatch({ batch, resolveOffset, commitOffsetsIfNecessary, heartbeat }) {
    const { partition } = batch
    for (const messages of pieces(batch.messages)) {
      // Batches that were fetched before a rebalance may come after it began.
      if (!held.has(partition)) return
      for (const { offset, value } of messages) {
        say('record', [partition], { offset: Number(offset), value: String(value) })
      }
      const { offset: last } = messages.at(-1)
      resolveOffset(last)
      const offset = Number(last) + 1
      const partitions = [{ partition, offset: String(offset) }]
      try {
        await commitOffsetsIfNecessary({ topics: [{ topic, partitions }] })
      } catch (error) {
        // The broker refused: what is held is no longer so. Joining again is the client's business.
        if (error.type) held.revoke()
        throw error
      }
      say('committed', [partition], { offset })
      await heartbeat()
    }
  }

  await consumer.connect()
  await consumer.subscribe({ topics: [topic], fromBeginning: true })
  await consumer.run({ autoCommit: false, eachBatchAutoResolve: false, eachBatch })
  await over
  held.revoke()
  await consumer.disconnect()
}

async function producer() {
  const client = connect(address, PATIENT).producer({ idempotent: true, maxInFlightRequests: 1 })
  await client.connect()
  await sendNumbers(values =>
    client.send({ topic, acks: -1, messages: values.map(value => ({ value, partition: 0 })) })
  )
  await client.disconnect()
}

await { member, producer }[told.role]()
process.exit(0)
