"""The beanstalk protocol: its grammar, and the conversation with one client. Bytes in, bytes out."""
