// @platformatic/kafka, driven by lines of JSON.

import { Inbox, serve, text } from './driver.mjs'
import { Admin, Consumer, Producer, options } from './platformatic-client.mjs'

async function producer(address, settings) {
  const client = new Producer({ ...options(address), autocreateTopics: true, ...settings })
  let open = client

  // Where each record went to. The answer has one place a partition; here there is one partition.
  async function send(topic, records) {
    const messages = records.map(({ headers, key, value, timestamp, ...record }) => ({
      topic,
      key: key ?? undefined,
      value: value ?? undefined,
      headers: new Map(headers.map(([name, value]) => [Buffer.from(name), value])),
      timestamp: timestamp === undefined ? undefined : BigInt(timestamp),
      ...record
    }))
    const { offsets } = await open.send({ messages })
    if (!offsets) return []
    const [{ partition, offset }] = offsets
    return messages.map((_, index) => ({ partition, offset: Number(offset) + index }))
  }

  // It takes its id over when its first transaction begins.
  const transactions = {
    init: () => {},
    begin: async () => { open = await client.beginTransaction() },
    sendOffset: (group, topic, offset) => sendOffset(address, open, group, topic, offset),
    commit: () => open.commit(),
    abort: () => open.abort()
  }

  return { client, send, transactions, close: () => client.close() }
}

// Offsets go with a transaction as those of messages, which a member of the group has read.
async function sendOffset(address, transaction, groupId, topic, offset) {
  const member = new Consumer({ ...options(address), groupId, autocommit: false, maxWaitTime: 100 })
  const offsets = [{ topic, partition: 0, offset: BigInt(offset - 1) }]
  const stream = await member.consume({ topics: [topic], mode: 'manual', offsets })
  for await (const message of stream) {
    await transaction.addConsumer(member)
    await transaction.addOffset(message)
    break
  }
  await stream.close()
  await member.close(true)
}

async function consumer(address, settings) {
  const client = new Consumer({
    ...options(address),
    groupId: 'nobody',
    autocommit: false,
    maxWaitTime: 100,
    ...settings
  })
  const inbox = new Inbox()
  let stream

  async function consume(more) {
    stream = await client.consume(more)
    stream.on('data', message => inbox.push(shown(message)))
    stream.on('error', error => inbox.fail(error))
  }

  const subscribe = topics => consume({ topics, mode: 'committed', fallbackMode: 'earliest' })

  // There is no reading without a group, but in any group one may begin where one wants.
  async function assign(partitions) {
    const topics = [...new Set(partitions.map(([topic]) => topic))]
    const [start] = partitions.map(([, , start]) => start)
    if (start === 'start') return await consume({ topics, mode: 'earliest' })
    if (start === 'end') return await consume({ topics, mode: 'latest' })
    const offsets = []
    for (const [topic, partition, start] of partitions) {
      const offset = start.time === undefined ? start : await offsetAt(topic, partition, start.time)
      offsets.push({ topic, partition, offset: BigInt(offset) })
    }
    await consume({ topics, mode: 'manual', offsets })
  }

  async function offsetAt(topic, partition, time) {
    const found = await client.listOffsets({ topics: [topic], timestamp: BigInt(time) })
    return found.get(topic)[partition]
  }

  async function close() {
    await stream?.close()
    await client.close(true)
  }

  return { client, inbox, subscribe, assign, close }
}

function shown({ topic, partition, offset, timestamp, key, value, headers }) {
  return {
    topic,
    partition,
    offset: Number(offset),
    timestamp: Number(timestamp),
    key: text(key),
    value: text(value),
    headers: [...headers].map(([name, value]) => [text(name), text(value)])
  }
}

async function admin(address, settings) {
  const client = new Admin({ ...options(address), ...settings })
  return { client, close: () => client.close() }
}

await serve({ producer, consumer, admin })
