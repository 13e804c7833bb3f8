// Runs the steps of one Node.js client one after the other and prints a line for each: `ok NAME`, `skip NAME: why`
// or `not ok NAME: why`. Every client program of tests/clients prints the same, so one test can judge them all.
'use strict'

const STEP_LIMIT_MS = 20000

function limited (promise) {
  let timer
  const late = new Promise((resolve, reject) => {
    timer = setTimeout(() => reject(new Error('no end within its time limit')), STEP_LIMIT_MS)
  })
  return Promise.race([promise, late]).finally(() => clearTimeout(timer))
}

exports.skip = why => Object.assign(async () => {}, { why })

exports.run = async function (steps) {
  let failed = false
  for (const [name, step] of Object.entries(steps)) {
    if (step.why) {
      console.log(`skip ${name}: ${step.why}`)
      continue
    }
    try {
      await limited(step(`tube-${name}`))
      console.log(`ok ${name}`)
    } catch (error) {
      failed = true
      console.log(`not ok ${name}: ${String((error && error.stack) || error).replace(/\n\s*/g, ' | ')}`)
    }
  }
  process.exit(failed ? 1 : 0)
}

// The text with which `promise` fails; a promise that does not fail is an error.
exports.failure = async function (promise) {
  let value
  try {
    value = await promise
  } catch (error) {
    return error.message || String(error)
  }
  throw new Error(`expected an error, got ${JSON.stringify(value)}`)
}
