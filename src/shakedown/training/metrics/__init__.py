"""What a stage measures of its steps: time by phase, memory, throughput, MFU; tables and sinks."""
