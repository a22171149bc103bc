//! What is known of the build of this program.

/// The Git commit that the program was built from: of an optimised build from a repository, or as the variable `ISOCOMM_COMMIT` said when it was
/// built. What was changed and not committed does not show. `None` elsewhere, and in debug builds, which would have to be made anew for each commit.
pub const COMMIT: Option<&str> = option_env!("GPT2_BUILD_COMMIT");
