// kafkajs, driven by lines of JSON.

import kafkajs from 'kafkajs'
import { addToKafkajs } from './codecs.mjs'
import { Inbox, serve, text } from './driver.mjs'
import { connect } from './kafkajs-client.mjs'

const { CompressionTypes } = kafkajs
const CODECS = {
  none: CompressionTypes.None,
  gzip: CompressionTypes.GZIP,
  snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
  zstd: CompressionTypes.ZSTD
}

async function producer(address, { compression = 'none', acks = -1, ...settings }) {
  const client = connect(address).producer(settings)
  await client.connect()
  let open = client

  // Where each record went to. The answer has one place a partition; here there is one partition.
  async function send(topic, records) {
    const messages = records.map(({ headers, timestamp, ...record }) => ({
      ...record,
      headers: Object.fromEntries(headers),
      timestamp: timestamp === undefined ? undefined : String(timestamp)
    }))
    const settings = { acks, compression: CODECS[compression] }
    const [place] = await open.send({ topic, messages, ...settings })
    if (acks === 0) return []
    const { partition, baseOffset } = place
    return messages.map((_, index) => ({ partition, offset: Number(baseOffset) + index }))
  }

  // It takes its id over when its first transaction begins.
  const transactions = {
    init: () => {},
    begin: async () => { open = await client.transaction() },
    sendOffset: (consumerGroupId, topic, offset) => open.sendOffsets({
      consumerGroupId,
      topics: [{ topic, partitions: [{ partition: 0, offset: String(offset) }] }]
    }),
    commit: () => open.commit(),
    abort: () => open.abort()
  }

  return { client, send, transactions, close: () => client.disconnect() }
}

async function consumer(address, settings) {
  const kafka = connect(address)
  const client = kafka.consumer({ groupId: 'nobody', maxWaitTimeInMs: 100, ...settings })
  const inbox = new Inbox()
  client.on(client.events.CRASH, ({ payload }) => inbox.fail(payload.error))
  await client.connect()

  async function subscribe(topics, fromBeginning = true) {
    await client.subscribe({ topics, fromBeginning })
    const joined = new Promise((resolve, reject) => {
      client.on(client.events.GROUP_JOIN, resolve)
      client.on(client.events.CRASH, ({ payload }) => reject(payload.error))
    })
    await client.run({ autoCommit: false, eachMessage: one => inbox.push(shown(one)) })
    return (await joined).payload
  }

  // There is no reading without a group; whoever wants to begin somewhere seeks once it has joined,
  // before the first records come.
  async function assign(partitions) {
    const topics = [...new Set(partitions.map(([topic]) => topic))]
    const seeks = []
    for (const [topic, partition, start] of partitions) {
      if (typeof start === 'string') continue
      const offset = start.time === undefined ? start : await offsetAt(topic, partition, start.time)
      seeks.push({ topic, partition, offset: String(offset) })
    }
    await subscribe(topics, partitions.every(([, , start]) => start !== 'end'))
    for (const seek of seeks) client.seek(seek)
  }

  async function offsetAt(topic, partition, time) {
    const admin = kafka.admin()
    await admin.connect()
    const found = await admin.fetchTopicOffsetsByTimestamp(topic, time)
    await admin.disconnect()
    return found.find(one => one.partition === partition).offset
  }

  return { client, inbox, subscribe, assign, close: () => client.disconnect() }
}

function shown({ topic, partition, message }) {
  return {
    topic,
    partition,
    offset: Number(message.offset),
    timestamp: Number(message.timestamp),
    key: text(message.key),
    value: text(message.value),
    headers: Object.entries(message.headers).map(([name, value]) => [name, text(value)])
  }
}

async function admin(address, settings) {
  const client = connect(address).admin(settings)
  await client.connect()
  return { client, close: () => client.disconnect() }
}

await addToKafkajs()
await serve({ producer, consumer, admin })
