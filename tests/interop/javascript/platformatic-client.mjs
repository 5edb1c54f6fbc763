// @platformatic/kafka as its programs here use it.

import { addToNode } from './codecs.mjs'

await addToNode()
export const { Admin, Consumer, Producer } = await import('@platformatic/kafka')

export const options = address => ({ clientId: 'platformatic', bootstrapBrokers: [address] })

// For a producer whose broker is killed: it is back soon, and until then it tries again.
export const PATIENT = { retries: 2_000, retryDelay: 100 }
