//! Jobs that train.

pub mod pair;
pub mod rank;
pub mod run;
pub mod runner;
pub mod skew;
pub mod text;
pub mod trace;
pub mod worker;
