// fivebeans (npm) through a whole round: node fivebeans.js HOST PORT MAX_JOB_BYTES
'use strict'

const assert = require('assert')
const fivebeans = require('fivebeans')
const { failure, run } = require('./steps')

const [host, port, maxJobBytes] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])]

// A client whose commands return promises of what its callbacks get: one value, or an array of several.
function connect (tube) {
  const client = new fivebeans.client(host, port)
  const wrapped = new Proxy(client, {
    get: (target, command) => (...args) => new Promise((resolve, reject) => {
      target[command](...args, (error, ...values) => error ? reject(error) : resolve(values.length > 1 ? values : values[0]))
    })
  })
  return new Promise((resolve, reject) => {
    client.on('error', reject)
    client.on('connect', async () => {
      if (tube) {
        assert.strictEqual(await wrapped.use(tube), tube)
        assert.strictEqual(await wrapped.watch(tube), '2')
        assert.strictEqual(await wrapped.ignore('default'), '1')
      }
      resolve({ call: wrapped, end: () => client.end() })
    })
    client.connect()
  })
}

const secondsSince = start => (Date.now() - start) / 1000

run({
  async tubes (tube) {
    const { call } = await connect()
    assert.strictEqual(await call.list_tube_used(), 'default')
    assert.strictEqual(await call.use(tube), tube)
    assert.strictEqual(await call.list_tube_used(), tube)
    assert.strictEqual(await call.watch(tube), '2')
    assert.strictEqual(await call.watch(tube), '2')
    assert.deepStrictEqual(await call.list_tubes_watched(), ['default', tube])
    assert.strictEqual(await call.ignore('default'), '1')
    assert.strictEqual(await failure(call.ignore(tube)), 'NOT_IGNORED')
    const tubes = await call.list_tubes()
    assert.strictEqual(tubes[0], 'default')
    assert.ok(tubes.includes(tube))
    assert.strictEqual(await failure(call.use('-bad')), 'BAD_FORMAT')
  },

  async priority (tube) {
    const { call } = await connect(tube)
    for (const priority of [4294967295, 1, 1024, 1]) await call.put(priority, 0, 60, `p${priority}`)
    const order = []
    for (let i = 0; i < 4; i++) order.push((await call.reserve())[1].toString())
    assert.deepStrictEqual(order, ['p1', 'p1', 'p1024', 'p4294967295'])
  },

  async delay (tube) {
    const { call } = await connect(tube)
    const start = Date.now()
    const id = await call.put(0, 1, 60, 'later')
    assert.strictEqual(await failure(call.reserve_with_timeout(0)), 'TIMED_OUT')
    assert.strictEqual((await call.peek_delayed())[0], id)
    assert.strictEqual((await call.reserve_with_timeout(10))[0], id)
    assert.ok(secondsSince(start) >= 0.99, `came after ${secondsSince(start)} s`)
  },

  async deadline (tube) {
    const { call } = await connect(tube)
    const start = Date.now()
    const id = await call.put(0, 0, 2, 'short')
    await call.reserve()
    assert.strictEqual(await failure(call.reserve()), 'DEADLINE_SOON')
    assert.ok(secondsSince(start) >= 0.99)
    await call.touch(id)
    assert.strictEqual(await failure(call.reserve_with_timeout(30)), 'DEADLINE_SOON')
    assert.ok(secondsSince(start) >= 1.98)
    await call.destroy(id)
  },

  async expiry (tube) {
    const [slow, next] = [(await connect(tube)).call, (await connect(tube)).call]
    const id = await slow.put(0, 0, 1, 'again')
    const start = Date.now()
    assert.strictEqual((await slow.reserve())[0], id)
    assert.strictEqual((await next.reserve_with_timeout(10))[0], id)
    assert.ok(secondsSince(start) >= 0.99)
    assert.strictEqual((await next.stats_job(id)).timeouts, 1)
    assert.strictEqual(await failure(slow.touch(id)), 'NOT_FOUND')
    await next.destroy(id)
  },

  async release (tube) {
    const { call } = await connect(tube)
    const id = await call.put(10, 0, 60, 'back')
    await call.reserve()
    await call.release(id, 5, 100)
    const stats = await call.stats_job(id)
    assert.deepStrictEqual([stats.state, stats.pri, stats.delay, stats.releases], ['delayed', 5, 100, 1])
    await call.kick_job(id)
    assert.strictEqual((await call.reserve_with_timeout(0))[0], id)
    await call.release(id, 0, 0)
    assert.strictEqual((await call.reserve_with_timeout(0))[0], id)
  },

  async bury (tube) {
    const { call } = await connect(tube)
    const ids = []
    for (const body of ['a', 'b', 'c']) ids.push(await call.put(0, 0, 60, body))
    for (const id of ids) assert.strictEqual((await call.reserve())[0], id)
    for (const id of [ids[2], ids[0], ids[1]]) await call.bury(id, 7)
    assert.strictEqual((await call.peek_buried())[0], ids[2])
    assert.strictEqual(await call.kick(2), '2')
    assert.strictEqual((await call.peek_buried())[0], ids[1])
    assert.strictEqual((await call.reserve_with_timeout(0))[0], ids[0])
    assert.strictEqual((await call.reserve_with_timeout(0))[0], ids[2])
    assert.strictEqual(await failure(call.reserve_with_timeout(0)), 'TIMED_OUT')
  },

  async 'kick-job' (tube) {
    const { call } = await connect(tube)
    const [first, second] = [await call.put(0, 100, 60, 'a'), await call.put(0, 50, 60, 'b')]
    await call.kick_job(first)
    assert.strictEqual(await failure(call.kick_job(first)), 'NOT_FOUND')
    assert.strictEqual((await call.reserve_with_timeout(0))[0], first)
    assert.strictEqual(await call.kick(100), '1')
    assert.strictEqual((await call.reserve_with_timeout(0))[0], second)
  },

  async peek (tube) {
    const { call } = await connect(tube)
    for (const peek of ['peek_ready', 'peek_delayed', 'peek_buried']) {
      assert.strictEqual(await failure(call[peek]()), 'NOT_FOUND')
    }
    const id = await call.put(0, 0, 60, 'look')
    assert.strictEqual((await call.peek(id))[1].toString(), 'look')
    assert.strictEqual((await call.peek_ready())[0], id)
    await call.destroy(id)
    assert.strictEqual(await failure(call.peek(id)), 'NOT_FOUND')
  },

  async stats (tube) {
    const { call } = await connect(tube)
    const id = await call.put(3, 9, 8, 's')
    const job = await call.stats_job(id)
    assert.deepStrictEqual(
      [job.id, job.tube, job.state, job.pri, job.delay, job.ttr], [Number(id), tube, 'delayed', 3, 9, 8])
    const stats = await call.stats_tube(tube)
    assert.deepStrictEqual(
      [stats.name, stats['current-jobs-delayed'], stats['total-jobs'], stats['current-using']], [tube, 1, 1, 1])
    const server = await call.stats()
    assert.strictEqual(server['max-job-size'], maxJobBytes)
    assert.strictEqual(server.draining, false)
    assert.match(String(server.version), /^\d+(\.\d+)+/)
    assert.strictEqual(typeof server['rusage-utime'], 'number')
  },

  async pause (tube) {
    const { call } = await connect(tube)
    const id = await call.put(0, 0, 60, 'held')
    const start = Date.now()
    await call.pause_tube(tube, 1)
    assert.strictEqual((await call.stats_tube(tube)).pause, 1)
    assert.strictEqual(await failure(call.reserve_with_timeout(0)), 'TIMED_OUT')
    assert.strictEqual((await call.reserve_with_timeout(10))[0], id)
    assert.ok(secondsSince(start) >= 0.99)
    assert.strictEqual(await failure(call.pause_tube('nowhere', 1)), 'NOT_FOUND')
  },

  async errors (tube) {
    const { call } = await connect(tube)
    const none = '18446744073709551615'
    for (const [command, ...args] of [
      ['destroy'], ['touch'], ['release', 0, 0], ['bury', 0], ['kick_job'], ['peek'], ['stats_job']]) {
      assert.strictEqual(await failure(call[command](none, ...args)), 'NOT_FOUND', command)
    }
    assert.strictEqual(await failure(call.stats_tube('nowhere')), 'NOT_FOUND')
    assert.strictEqual(await failure(call.watch('no tube')), 'BAD_FORMAT')
    const other = await connect(tube)
    const id = await other.call.put(0, 0, 60, 'mine')
    await other.call.reserve()
    assert.strictEqual(await failure((await connect(tube)).call.destroy(id)), 'NOT_FOUND')
  },

  async bodies (tube) {
    const { call } = await connect(tube)
    const every = Buffer.from(Array.from({ length: 256 }, (_, n) => n))
    for (const body of [
      Buffer.alloc(0), every, Buffer.from([0xff, 0xfe, 0x80]), Buffer.from('two\r\nlines\r\n'),
      Buffer.from('put 0 0 1 1\r\n'), Buffer.alloc(maxJobBytes, every)]) {
      const id = await call.put(0, 0, 60, body)
      const [gotId, got] = await call.reserve_with_timeout(0)
      assert.strictEqual(gotId, id)
      assert.ok(got.equals(body), `${body.length} bytes`)
      await call.destroy(id)
    }
  },

  async 'too-big' (tube) {
    const { call } = await connect(tube)
    assert.strictEqual(await failure(call.put(0, 0, 60, Buffer.alloc(maxJobBytes + 1))), 'JOB_TOO_BIG')
    assert.ok(await call.put(0, 0, 60, 'fits'))
  },

  async blocked (tube) {
    const [worker, producer] = [(await connect(tube)).call, (await connect(tube)).call]
    const waiting = worker.reserve()
    while ((await producer.stats_tube(tube))['current-waiting'] !== 1);
    const id = await producer.put(0, 0, 60, 'served')
    assert.strictEqual((await waiting)[0], id)
    await worker.destroy(id)
  },

  async reconnect (tube) {
    const leaver = await connect(tube)
    const id = await leaver.call.put(0, 0, 60, 'kept')
    await leaver.call.reserve()
    leaver.end()
    const { call } = await connect(tube)
    assert.strictEqual((await call.reserve_with_timeout(10))[0], id)
    assert.strictEqual((await call.stats_job(id)).reserves, 2)
    await call.destroy(id)
  },

  // All commands are written before the first reply is read: this client pipelines.
  async bulk (tube) {
    const { call } = await connect(tube)
    const ids = await Promise.all(Array.from({ length: 500 }, (_, n) => call.put(0, 0, 60, `job ${n}`)))
    const jobs = await Promise.all(ids.map(() => call.reserve_with_timeout(0)))
    assert.deepStrictEqual(jobs.map(([id]) => id), ids)
    await Promise.all(ids.map(id => call.destroy(id)))
    assert.strictEqual((await call.stats_tube(tube))['cmd-delete'], 500)
  }
})
