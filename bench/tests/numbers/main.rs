//! The commands that compare numbers, which a busy machine does not change: one program, which is linked once.

mod memory;
mod paper;
mod parity;
