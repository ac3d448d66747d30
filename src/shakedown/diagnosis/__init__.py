"""Why a job hangs, from what it left: evidence read, judged, written. No network, no torch."""
