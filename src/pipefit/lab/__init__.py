"""lab/: a cluster on one machine. Hosts are network namespaces, links are shaped, devices are paced by hidden tables.

`load` reads a lab file; `lifecycle` makes the namespaces and takes them down; `launch` runs a command on every device;
`pace` is the only module that run/ and profile/ know: it makes a stage take the time of the emulated device.
"""
