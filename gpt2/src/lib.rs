//! GPT-2 and its training, over any communicator.

pub mod checkpoint;
pub mod config;
mod cross_entropy;
pub mod init;
mod math;
pub mod model;
pub mod optim;
pub mod segments;
pub mod sys;
