// Codecs that a client for Node.js does not bring along, from packages without native code.

import zstdWasm from '@bokuweb/zstd-wasm'
import kafkajs from 'kafkajs'
import snappy from 'kafkajs-snappy'
import lz4 from 'lz4js'
import zlib from 'node:zlib'

// kafkajs has gzip, and a place for the others.
export async function addToKafkajs() {
  await zstdWasm.init()
  const { CompressionCodecs, CompressionTypes } = kafkajs
  CompressionCodecs[CompressionTypes.Snappy] = snappy
  CompressionCodecs[CompressionTypes.LZ4] = codec(lz4.compress, lz4.decompress)
  CompressionCodecs[CompressionTypes.ZSTD] = codec(zstdWasm.compress, zstdWasm.decompress)
}

const codec = (compress, decompress) => () => ({
  compress: async encoder => Buffer.from(compress(encoder.buffer)),
  decompress: async buffer => Buffer.from(decompress(buffer))
})

// @platformatic/kafka takes zstd from Node.js, which has it from 22.15 on. To be called before that
// package is imported.
export async function addToNode() {
  if (zlib.zstdCompressSync) return
  await zstdWasm.init()
  zlib.zstdCompressSync = data => Buffer.from(zstdWasm.compress(data))
  zlib.zstdDecompressSync = data => Buffer.from(zstdWasm.decompress(data))
}
