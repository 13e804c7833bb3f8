# beaneater (Debian: ruby-beaneater) through a whole round: ruby round.rb HOST PORT MAX_JOB_BYTES
# Prints a line for each step, as all client programs here do: `ok NAME` or `not ok NAME: why`.
# frozen_string_literal: true

require 'beaneater'
require 'timeout'

HOST, PORT, MAX_JOB_BYTES = ARGV[0], ARGV[1], Integer(ARGV[2])
STEP_LIMIT_S = 20
STEPS = {}

def step(name, &block)
  STEPS[name] = block
end

def same(expected, got)
  raise "expected #{expected.inspect}, got #{got.inspect}" unless expected == got
end

def fails(error)
  value = yield
rescue error
  nil
else
  raise "expected #{error}, got #{value.inspect}"
end

def at_least(seconds, start)
  passed = now - start
  raise "came after #{passed} s" if passed < seconds
end

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def connect(tube = nil)
  client = Beaneater.new("#{HOST}:#{PORT}")
  client.tubes.watch!(tube) if tube
  client
end

step 'tubes' do |name|
  client = connect
  same 'default', client.tubes.used.name
  client.tubes.use(name)
  same name, client.tubes.used.name
  client.tubes.watch(name)
  same ['default', name], client.tubes.watched.map(&:name)
  client.tubes.ignore('default')
  same [name], client.tubes.watched.map(&:name)
  fails(Beaneater::NotIgnoredError) { client.tubes.ignore(name) }
  same 'default', client.tubes.all.first.name
  same true, client.tubes.all.map(&:name).include?(name)
  fails(Beaneater::InvalidTubeName) { client.tubes.use('-bad') }
end

step 'priority' do |name|
  client = connect(name)
  [4_294_967_295, 1, 1024, 1].each { |pri| client.tubes[name].put("p#{pri}", pri: pri) }
  same %w[p1 p1 p1024 p4294967295], (Array.new(4) { client.tubes.reserve.body })
end

step 'delay' do |name|
  client = connect(name)
  start = now
  id = client.tubes[name].put('later', delay: 1)[:id]
  fails(Beaneater::TimedOutError) { client.tubes.reserve(0) }
  same id, client.tubes[name].peek(:delayed).id
  same id, client.tubes.reserve(10).id
  at_least 0.99, start
end

step 'deadline' do |name|
  client = connect(name)
  start = now
  client.tubes[name].put('short', ttr: 2)
  job = client.tubes.reserve
  fails(Beaneater::DeadlineSoonError) { client.tubes.reserve }
  at_least 0.99, start
  job.touch
  fails(Beaneater::DeadlineSoonError) { client.tubes.reserve(30) }
  at_least 1.98, start
  job.delete
end

step 'expiry' do |name|
  slow = connect(name)
  other = connect(name)
  slow.tubes[name].put('again', ttr: 1)
  start = now
  held = slow.tubes.reserve
  job = other.tubes.reserve(10)
  same held.id, job.id
  at_least 0.99, start
  same 1, job.stats.timeouts
  fails(Beaneater::NotFoundError) { held.touch }
  job.delete
end

step 'release' do |name|
  client = connect(name)
  client.tubes[name].put('back', pri: 10)
  job = client.tubes.reserve
  job.release(pri: 5, delay: 100)
  stats = job.stats
  same ['delayed', 5, 100, 1], [stats.state, stats.pri, stats.delay, stats.releases]
  job.kick
  again = client.tubes.reserve(0)
  same job.id, again.id
  again.release(pri: 0, delay: 0)
  same job.id, client.tubes.reserve(0).id
end

step 'bury' do |name|
  client = connect(name)
  %w[a b c].each { |body| client.tubes[name].put(body) }
  jobs = Array.new(3) { client.tubes.reserve }
  jobs.values_at(2, 0, 1).each { |job| job.bury(pri: 7) }
  same 'c', client.tubes[name].peek(:buried).body
  same '2', client.tubes[name].kick(2)[:id]
  same 'b', client.tubes[name].peek(:buried).body
  same %w[a c], (Array.new(2) { client.tubes.reserve(0).body })
  fails(Beaneater::TimedOutError) { client.tubes.reserve(0) }
end

step 'kick-job' do |name|
  client = connect(name)
  ids = [100, 50].map { |delay| client.tubes[name].put('x', delay: delay)[:id] }
  job = client.jobs.find(ids[0])
  job.kick
  fails(Beaneater::NotFoundError) { job.kick }
  same ids[0], client.tubes.reserve(0).id
  same '1', client.tubes[name].kick(100)[:id]
  same ids[1], client.tubes.reserve(0).id
end

step 'peek' do |name|
  client = connect(name)
  tube = client.tubes[name]
  %i[ready delayed buried].each { |state| same nil, tube.peek(state) }
  id = tube.put('look')[:id]
  same 'look', client.jobs.find(id).body
  same id, tube.peek(:ready).id
  client.jobs.find(id).delete
  same nil, client.jobs.find(id)
end

step 'stats' do |name|
  client = connect(name)
  id = client.tubes[name].put('s', pri: 3, delay: 9, ttr: 8)[:id]
  job = client.jobs.find(id).stats
  same [Integer(id), name, 'delayed', 3, 9, 8], [job['id'], job.tube, job.state, job.pri, job['delay'], job.ttr]
  tube = client.tubes[name].stats
  same [name, 1, 1, 1], [tube.name, tube.current_jobs_delayed, tube.total_jobs, tube.current_using]
  stats = client.stats
  same MAX_JOB_BYTES, stats.max_job_size
  same false, stats.draining
  same true, /\A\d+(\.\d+)+/.match?(stats.version.to_s)
  same true, stats.rusage_utime.is_a?(Float)
end

step 'pause' do |name|
  client = connect(name)
  client.tubes[name].put('held')
  start = now
  client.tubes[name].pause(1)
  same 1, client.tubes[name].stats.pause
  fails(Beaneater::TimedOutError) { client.tubes.reserve(0) }
  same 'held', client.tubes.reserve(10).body
  at_least 0.99, start
  fails(Beaneater::NotFoundError) { client.tubes['nowhere'].pause(1) }
end

step 'errors' do |name|
  client = connect(name)
  client.tubes[name].put('once')
  job = client.tubes.reserve
  job.delete
  [-> { job.delete }, -> { job.touch }, -> { job.kick }, -> { job.stats },
   -> { job.release(pri: 0, delay: 0) }, -> { job.bury(pri: 0) }].each do |command|
    fails(Beaneater::NotFoundError, &command)
  end
  fails(Beaneater::NotFoundError) { client.tubes['nowhere'].stats }
  same false, job.exists?
  client.tubes[name].put('mine')
  held = client.tubes.reserve
  fails(Beaneater::NotFoundError) { connect(name).jobs.find(held.id).delete }
end

step 'bodies' do |name|
  client = connect(name)
  every = (0..255).to_a.pack('C*')
  ['', every, "\xFF\xFE\x80".b, "two\r\nlines\r\n", "put 0 0 1 1\r\n", every * (MAX_JOB_BYTES / 256)].each do |body|
    id = client.tubes[name].put(body.dup)[:id]
    job = client.tubes.reserve(0)
    same id, job.id
    raise "#{body.bytesize} bytes came back changed" unless body.b == job.body.b

    job.delete
  end
end

step 'too-big' do |name|
  client = connect(name)
  fails(Beaneater::JobTooBigError) { client.tubes[name].put('x' * (MAX_JOB_BYTES + 1)) }
  same 'INSERTED', client.tubes[name].put('fits')[:status]
end

step 'blocked' do |name|
  worker = connect(name)
  producer = connect(name)
  waiting = Thread.new { worker.tubes.reserve }
  nil until producer.tubes[name].stats.current_waiting == 1
  id = producer.tubes[name].put('served')[:id]
  job = waiting.value
  same id, job.id
  job.delete
end

step 'reconnect' do |name|
  leaver = connect(name)
  leaver.tubes[name].put('kept')
  id = leaver.tubes.reserve.id
  leaver.close
  job = connect(name).tubes.reserve(10)
  same id, job.id
  same 2, job.stats.reserves
  job.delete
end

step 'bulk' do |name|
  client = connect(name)
  ids = Array.new(500) { |n| client.tubes[name].put("job #{n}")[:id] }
  same ids, (Array.new(500) { client.tubes.reserve(0).tap(&:delete).id })
  same 500, client.tubes[name].stats.cmd_delete
end

failed = false
$stdout.sync = true
STEPS.each do |name, block|
  Timeout.timeout(STEP_LIMIT_S) { block.call("tube-#{name}") }
  puts "ok #{name}"
rescue StandardError => e
  failed = true
  puts "not ok #{name}: #{e.class} #{e.message} #{e.backtrace.first(3).join(' | ')}".tr("\n", ' ')
end
exit(failed ? 1 : 0)
