"""`strategy="adaptive"`: begins as all-reduce, and changes to what ends training sooner."""
