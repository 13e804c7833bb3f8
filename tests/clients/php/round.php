<?php
// pheanstalk (Debian: php-pda-pheanstalk) through a whole round: php round.php HOST PORT MAX_JOB_BYTES
// Prints a line for each step, as all client programs here do: `ok NAME`, `skip NAME: why` or `not ok NAME: why`.

declare(strict_types=1);

require 'Pheanstalk/autoload.php'; // from PHP's include path

use Pheanstalk\Exception\DeadlineSoonException;
use Pheanstalk\Exception\JobNotFoundException;
use Pheanstalk\Exception\JobTooBigException;
use Pheanstalk\Exception\ServerBadFormatException;
use Pheanstalk\Exception\ServerException;
use Pheanstalk\JobId;
use Pheanstalk\Pheanstalk;

const CONNECT_LIMIT_S = 10;

[$program, $host, $port, $maxJobBytes] = $argv;
$port = (int) $port;
$maxJobBytes = (int) $maxJobBytes;

function client(?string $tube = null): Pheanstalk
{
    global $host, $port;
    $client = Pheanstalk::create($host, $port, CONNECT_LIMIT_S);

    return $tube === null ? $client : $client->useTube($tube)->watchOnly($tube);
}

function same($expected, $got): void
{
    if ($expected !== $got) {
        throw new RuntimeException('expected ' . var_export($expected, true) . ', got ' . var_export($got, true));
    }
}

function fails(string $error, callable $command): void
{
    try {
        $value = $command();
    } catch (Throwable $got) {
        if ($got instanceof $error) {
            return;
        }
        throw $got;
    }
    throw new RuntimeException("expected $error, got " . var_export($value, true));
}

function atLeast(float $seconds, float $start): void
{
    $passed = microtime(true) - $start;
    if ($passed < $seconds) {
        throw new RuntimeException("came after $passed s");
    }
}

// Waits for a client of `tube` in another process, then puts: what the step `blocked` runs beside itself.
if (isset($argv[4])) {
    $producer = client()->useTube($argv[4]);
    while ($producer->statsTube($argv[4])['current-waiting'] !== '1');
    $producer->put('served');
    exit(0);
}

$steps = [
    'tubes' => function (string $tube): void {
        $client = client();
        same('default', $client->listTubeUsed(true));
        $client->useTube($tube);
        same($tube, $client->listTubeUsed(true));
        $client->watch($tube);
        same(['default', $tube], $client->listTubesWatched(true));
        $client->ignore('default');
        same([$tube], $client->listTubesWatched(true));
        fails(ServerException::class, fn() => $client->ignore($tube));
        same('default', $client->listTubes()[0]);
        same(true, in_array($tube, $client->listTubes(), true));
        fails(ServerBadFormatException::class, fn() => $client->useTube('-bad'));
    },
    'priority' => function (string $tube): void {
        $client = client($tube);
        foreach ([4294967295, 1, 1024, 1] as $priority) {
            $client->put("p$priority", $priority);
        }
        $order = array_map(fn() => $client->reserve()->getData(), range(1, 4));
        same(['p1', 'p1', 'p1024', 'p4294967295'], $order);
    },
    'delay' => function (string $tube): void {
        $client = client($tube);
        $start = microtime(true);
        $id = $client->put('later', 0, 1)->getId();
        same(null, $client->reserveWithTimeout(0));
        same($id, $client->peekDelayed()->getId());
        same($id, $client->reserveWithTimeout(10)->getId());
        atLeast(0.99, $start);
    },
    'deadline' => function (string $tube): void {
        $client = client($tube);
        $start = microtime(true);
        $client->put('short', 0, 0, 2);
        $job = $client->reserve();
        fails(DeadlineSoonException::class, fn() => $client->reserve());
        atLeast(0.99, $start);
        $client->touch($job);
        fails(DeadlineSoonException::class, fn() => $client->reserveWithTimeout(30));
        atLeast(1.98, $start);
        $client->delete($job);
    },
    'expiry' => function (string $tube): void {
        [$slow, $next] = [client($tube), client($tube)];
        $slow->put('again', 0, 0, 1);
        $start = microtime(true);
        $held = $slow->reserve();
        $job = $next->reserveWithTimeout(10);
        same($held->getId(), $job->getId());
        atLeast(0.99, $start);
        same('1', $next->statsJob($job)['timeouts']);
        fails(JobNotFoundException::class, fn() => $slow->touch($held));
        $next->delete($job);
    },
    'release' => function (string $tube): void {
        $client = client($tube);
        $client->put('back', 10);
        $job = $client->reserve();
        $client->release($job, 5, 100);
        $stats = $client->statsJob($job);
        same(['delayed', '5', '100', '1'], [$stats['state'], $stats['pri'], $stats['delay'], $stats['releases']]);
        $client->kickJob($job);
        same($job->getId(), $client->reserveWithTimeout(0)->getId());
        $client->release($job, 0, 0);
        same($job->getId(), $client->reserveWithTimeout(0)->getId());
    },
    'bury' => function (string $tube): void {
        $client = client($tube);
        foreach (['a', 'b', 'c'] as $body) {
            $client->put($body);
        }
        $jobs = array_map(fn() => $client->reserve(), range(1, 3));
        foreach ([2, 0, 1] as $n) {
            $client->bury($jobs[$n], 7);
        }
        same('c', $client->peekBuried()->getData());
        same(2, $client->kick(2));
        same('b', $client->peekBuried()->getData());
        same('a', $client->reserveWithTimeout(0)->getData());
        same('c', $client->reserveWithTimeout(0)->getData());
        same(null, $client->reserveWithTimeout(0));
    },
    'kick-job' => function (string $tube): void {
        $client = client($tube);
        [$first, $second] = [$client->put('a', 0, 100), $client->put('b', 0, 50)];
        $client->kickJob($first);
        fails(JobNotFoundException::class, fn() => $client->kickJob($first));
        same($first->getId(), $client->reserveWithTimeout(0)->getId());
        same(1, $client->kick(100));
        same($second->getId(), $client->reserveWithTimeout(0)->getId());
    },
    'peek' => function (string $tube): void {
        $client = client($tube);
        same([null, null, null], [$client->peekReady(), $client->peekDelayed(), $client->peekBuried()]);
        $job = $client->put('look');
        same('look', $client->peek($job)->getData());
        same($job->getId(), $client->peekReady()->getId());
        $client->delete($job);
        fails(JobNotFoundException::class, fn() => $client->peek($job));
    },
    'stats' => function (string $tube) use ($maxJobBytes): void {
        $client = client($tube);
        $put = $client->put('s', 3, 9, 8);
        $job = $client->statsJob($put);
        same((string) $put->getId(), $job['id']);
        same($tube, trim($job['tube'], '"')); // this client's parser keeps the quotes
        same(['delayed', '3', '9', '8'], [$job['state'], $job['pri'], $job['delay'], $job['ttr']]);
        $stats = $client->statsTube($tube);
        same(['1', '1', '1'], [$stats['current-jobs-delayed'], $stats['total-jobs'], $stats['current-using']]);
        $server = $client->stats();
        same((string) $maxJobBytes, $server['max-job-size']);
        same('false', $server['draining']);
        same(1, preg_match('/^"\d+(\.\d+)+/', $server['version']));
    },
    'pause' => function (string $tube): void {
        $client = client($tube);
        $client->put('held');
        $start = microtime(true);
        $client->pauseTube($tube, 1);
        same('1', $client->statsTube($tube)['pause']);
        same(null, $client->reserveWithTimeout(0));
        same('held', $client->reserveWithTimeout(10)->getData());
        atLeast(0.99, $start);
        $client->pauseTube($tube, 100);
        $client->resumeTube($tube);
        same('0', $client->statsTube($tube)['pause']);
        fails(ServerException::class, fn() => $client->pauseTube('nowhere', 1));
    },
    'errors' => function (string $tube): void {
        $client = client($tube);
        $none = new JobId(PHP_INT_MAX);
        foreach (['delete', 'touch', 'release', 'bury', 'kickJob', 'peek'] as $command) {
            fails(JobNotFoundException::class, fn() => $client->$command($none));
        }
        fails(ServerException::class, fn() => $client->statsJob($none));
        fails(ServerException::class, fn() => $client->statsTube('nowhere'));
        $client->put('mine');
        $job = $client->reserve();
        fails(JobNotFoundException::class, fn() => client($tube)->delete($job));
    },
    'bodies' => function (string $tube) use ($maxJobBytes): void {
        $client = client($tube);
        $every = implode('', array_map('chr', range(0, 255)));
        $large = str_repeat($every, intdiv($maxJobBytes, 256));
        foreach (['', $every, "\xFF\xFE\x80", "two\r\nlines\r\n", "put 0 0 1 1\r\n", $large] as $body) {
            $id = $client->put($body)->getId();
            $job = $client->reserveWithTimeout(0);
            same($id, $job->getId());
            same(true, $body === $job->getData());
            $client->delete($job);
        }
    },
    'too-big' => function (string $tube) use ($maxJobBytes): void {
        $client = client($tube);
        fails(JobTooBigException::class, fn() => $client->put(str_repeat('x', $maxJobBytes + 1)));
        $client->put('fits');
    },
    'blocked' => function (string $tube) use ($program, $host, $port, $maxJobBytes): void {
        $worker = client($tube);
        $producer = proc_open([PHP_BINARY, $program, $host, "$port", "$maxJobBytes", $tube], [], $pipes);
        $job = $worker->reserve();
        same('served', $job->getData());
        same(0, proc_close($producer));
        $worker->delete($job);
    },
    'reconnect' => function (string $tube): void {
        $leaver = client($tube);
        $leaver->put('kept');
        $id = $leaver->reserve()->getId();
        unset($leaver);
        gc_collect_cycles(); // closes the socket
        $next = client($tube);
        $job = $next->reserveWithTimeout(10);
        same($id, $job->getId());
        same('2', $next->statsJob($job)['reserves']);
        $next->delete($job);
    },
    'bulk' => function (string $tube): void {
        $client = client($tube);
        $ids = array_map(fn($n) => $client->put("job $n")->getId(), range(1, 500));
        foreach ($ids as $id) {
            $job = $client->reserveWithTimeout(0);
            same($id, $job->getId());
            $client->delete($job);
        }
        same('500', $client->statsTube($tube)['cmd-delete']);
    },
];

$failed = false;
foreach ($steps as $name => $step) {
    try {
        $step("tube-$name");
        echo "ok $name\n";
    } catch (Throwable $error) {
        $failed = true;
        $where = basename($error->getFile()) . ':' . $error->getLine();
        echo "not ok $name: " . get_class($error) . ' ' . strtr($error->getMessage(), "\n", ' ') . " at $where\n";
    }
}
exit($failed ? 1 : 0);
