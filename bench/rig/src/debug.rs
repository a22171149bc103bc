//! Debug builds, whose figures say nothing.

use gpt2::cli::say;

use crate::BenchError;

/// Refuses a debug build, of which `what` is true, unless the user allows it.
///
/// # Errors
/// The refusal.
pub fn refuse(allowed: bool, what: &str) -> Result<(), BenchError> {
    if cfg!(debug_assertions) && !allowed {
        return Err(format!("this is a debug build, {what}; build with --release, or pass --allow-debug").into());
    }
    Ok(())
}

/// Refuses a debug build for its timings; where the user allows it, says what they are worth.
///
/// # Errors
/// The refusal.
pub fn refuse_timings(allowed: bool) -> Result<(), BenchError> {
    refuse(allowed, NO_TIMINGS)?;
    if cfg!(debug_assertions) {
        say("DEBUG BUILD: the times below are not meaningful");
    }
    Ok(())
}

/// What is wrong with timings of a debug build.
pub const NO_TIMINGS: &str = "whose times are not meaningful";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_debug_build_is_refused_and_only_unless_allowed() {
        assert_eq!(refuse(false, NO_TIMINGS).is_err(), cfg!(debug_assertions));
        assert!(refuse_timings(true).is_ok());
    }
}
