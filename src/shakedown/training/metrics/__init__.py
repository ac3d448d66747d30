"""The measurements of a stage's steps: time by phase, memory, throughput, MFU; tables and sinks."""
