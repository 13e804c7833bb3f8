// Loaded before fivebeans' own test suite, which always connects to port 11300: leads it to $SERVER_PORT instead.
'use strict'

const net = require('net')
const connect = net.createConnection
net.createConnection = (port, ...rest) => connect.call(net, port === 11300 ? Number(process.env.SERVER_PORT) : port, ...rest)
