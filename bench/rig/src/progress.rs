//! Progress on the terminal.

pub use indicatif::ProgressBar;
use indicatif::{ProgressFinish, ProgressStyle};

/// A bar on a terminal; elsewhere nothing.
pub fn bar(len: usize) -> ProgressBar {
    // Gone with the command, however that ends.
    let bar = ProgressBar::new(len as u64).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg} ({elapsed})") {
        bar.set_style(style);
    }
    bar
}
