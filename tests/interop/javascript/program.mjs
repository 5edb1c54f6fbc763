// What all programs share that play a part in a scenario; tests/interop/programs.py says how.

// Told when the program was started.
export const told = JSON.parse(process.argv[2])

// When stdin is closed, it is over.
export const over = new Promise(resolve => process.stdin.on('end', resolve).resume())

export function say(kind, partitions, more = {}) {
  process.stdout.write(JSON.stringify({ kind, at_ms: Date.now(), partitions, ...more }) + '\n')
}

// The partitions that a member has, as it is told by a client of the eager protocol: all are
// revoked and assigned anew each time.
export class Held {
  #partitions = []

  has(partition) {
    return this.#partitions.includes(partition)
  }

  assign(partitions) {
    this.revoke()
    this.#partitions = partitions
    say('assigned', partitions)
  }

  revoke() {
    if (this.#partitions.length > 0) say('revoked', this.#partitions)
    this.#partitions = []
  }
}

// Send 0, 1, 2, … in batches by `send`, with some under way at the same time, until it is over.
export async function sendNumbers(send, { batch = 20, underWay = 1 } = {}) {
  let isOver = false
  over.then(() => { isOver = true })
  let count = 0
  const sending = new Set()
  while (!isOver) {
    const values = Array.from({ length: batch }, () => String(count++))
    const sent = send(values).finally(() => sending.delete(sent))
    sending.add(sent)
    if (sending.size >= underWay) await Promise.race(sending)
    // A pace that leaves the machine to others, too.
    await new Promise(resolve => setTimeout(resolve, 5))
  }
  await Promise.all(sending)
  say('sent', [], { count })
}

// So many at a time; what came with them is committed before the next.
export function* pieces(messages, length = 20) {
  for (let start = 0; start < messages.length; start += length) {
    yield messages.slice(start, start + length)
  }
}
