"""A cluster emulated on one machine: hosts are network namespaces, links are shaped by htb, devices are paced by hidden
timing tables.

`spec` reads a lab file, `lifecycle` creates and removes the namespaces, `launch` runs a command on every device. `pace`
is the only module that run/ and profile/ import: it makes a stage take the time of the emulated device.
"""
