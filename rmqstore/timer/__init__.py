"""The files of a broker's timer: what waits in the time wheel, and where its records are in the commit log.

Owns the bytes of ``timerwheel``, ``timerlog/`` and ``config/timercheck``.  It reads only, never writes, and does not
know the commit log: whose message a unit stands for is found out by the rooms that read the log.

- `timer_files`: `TimerCheckpoint`, config/timercheck: what was fired, and what was taken in; `TimerLog`, the units of 52 bytes, one
  for each message of the wheel; `TimerWheel`, its slots, also of a snapshot; `waiting_units`, the units that have not fired
"""
