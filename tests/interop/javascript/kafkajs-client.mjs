// kafkajs as its programs here use it: complaints go to stderr, a line each.

import kafkajs from 'kafkajs'

const { Kafka, Partitioners, logLevel } = kafkajs

const logCreator = () => ({ level, namespace, label, log }) => {
  const { message, error } = log
  process.stderr.write(`${label} [${namespace}] ${message}${error ? `: ${error}` : ''}\n`)
}

// For programs whose broker is killed: it is back soon, and until then they try again.
export const PATIENT = {
  retry: { initialRetryTime: 50, maxRetryTime: 500, retries: Number.MAX_SAFE_INTEGER }
}

export function connect(address, settings = {}) {
  const kafka = new Kafka({
    clientId: 'kafkajs',
    brokers: [address],
    logLevel: logLevel.WARN,
    logCreator,
    ...settings
  })
  const producer = kafka.producer.bind(kafka)
  // It warns of a change of the default unless one is chosen.
  kafka.producer = settings =>
    producer({ createPartitioner: Partitioners.DefaultPartitioner, ...settings })
  return kafka
}
