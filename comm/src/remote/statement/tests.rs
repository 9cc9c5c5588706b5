//! Statements come back as they were.
