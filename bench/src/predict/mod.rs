//! `bench record`, `replay`, `calibrate`, `predict` and `advise`: traces of steps, and what they would take on a network that is not there. What a trace is, and
//! how it is simulated, is the crate `bench-predict`.

mod advise;
mod against;
mod alone;
mod calibrate;
mod cells;
mod forecast;
mod link;
mod load;
mod perform;
mod record;
mod replay;
mod steps;

pub(crate) use advise::{AdviseArgs, run as advise};
pub(crate) use against::{Comparison, PREDICTIONS, TITLE as PICTURE_TITLE};
pub(crate) use calibrate::{CalibrateArgs, run as calibrate};
pub(crate) use forecast::{PredictArgs, run as predict};
pub(crate) use perform::Task;
pub(crate) use record::{RecordArgs, run as record};
pub(crate) use replay::{ReplayArgs, run as replay};
