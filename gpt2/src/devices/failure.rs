//! What a device says that could not do what it was asked to, for people.

use std::fmt::Display;

/// A backend's error as one line: its innermost cause, without the chain that led there, and what to try where that is known.
pub(crate) fn reason(error: impl Display) -> String {
    let text = error.to_string();
    let told = text.lines().map(str::trim).take_while(|line| !ENDS.iter().any(|end| line.contains(end)));
    let told: Vec<&str> = told.filter(|line| !line.is_empty()).collect();
    let cause = told.rsplit(|line| *line == "Caused by:").next().unwrap_or_default().join("; ");
    let text = text.to_lowercase();
    let shows = |signs: &[&str]| signs.iter().any(|sign| text.contains(sign));
    let hint = if shows(&OUT_OF_MEMORY) {
        "; give a smaller --batch or --block-size, a larger --accumulation, --recompute, or a 16-bit --precision"
    } else if shows(&LOST) {
        "; this process can no longer use the GPU: look for `Xid` in the kernel's log, and start again"
    } else {
        ""
    };
    format!("{cause}{hint}")
}

/// By which a line is known from which on nothing is told but where the error was made: `Backtrace:`, `No backtrace available`, `Asked at:`.
const ENDS: [&str; 2] = ["acktrace", "Asked at"];

const OUT_OF_MEMORY: [&str; 3] = ["out of device memory", "out of memory", "out_of_memory"];

/// By which CUDA's errors are known after which nothing works any more.
const LOST: [&str; 6] =
    ["poisoned", "illegal_address", "launch_failed", "launch_timeout", "ecc_uncorrectable", "illegal_instruction"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_cause_is_told_and_what_to_try() {
        let out_of_memory = "An error happened during execution\nCaused by:\n  Several failures at once\nCaused by:\n  \
                             The bytes were never written (failure #5788)\n  skipped `CrossEntropy`\nCaused by:\n  \
                             out of device memory allocating 2097152 bytes\nNo backtrace available\nAsked at:\nNo backtrace available";
        let said = reason(out_of_memory);
        assert!(said.starts_with("out of device memory allocating 2097152 bytes; give a smaller --batch"), "{said}");
        let lost = "The device is poisoned\nCaused by:\n  A launch error happened\nCaused by:\n  The device was poisoned during launch\n\
                    Caused by:\n  cuLaunchKernel failed with status 700\nBacktrace:\nNo backtrace available";
        let said = reason(lost);
        assert!(
            said.starts_with("cuLaunchKernel failed with status 700; this process can no longer use the GPU"),
            "{said}"
        );
        assert_eq!(reason("one line"), "one line");
        assert_eq!(reason("two\nlines"), "two; lines");
        assert_eq!(reason(""), "");
    }
}
