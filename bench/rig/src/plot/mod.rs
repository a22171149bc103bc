//! Pictures of results, as SVG that is written here, element by element: a few kinds of chart need no library.
//!
//! A picture's colours are names (`var(--c4)`), so that a page can show it on light and on dark; [`css`] gives them their values, and
//! [`write()`] puts in the light ones.

mod axis;
mod bars;
mod heat;
mod lines;
mod panels;
mod stack;
mod svg;
mod theme;

use std::fs;
use std::path::Path;

pub use bars::{Bars, bars};
pub use heat::{Heat, Square, heat};
pub use lines::{Curve, Line, Point, Scale, curves, lines};
pub use panels::{Panel, Panels, panels};
pub use stack::{Group, Stack, stack};
pub use svg::escaped;
pub use theme::{COLOURS, css};

/// Width of a picture in pixels, where its content does not say; a picture of bars is as high as it must be.
const WIDTH: f64 = 960.0;

/// Place above the plot, for the title.
const TOP: f64 = 54.0;

/// Place below it, for numbers and the name of the axis.
const BOTTOM: f64 = 62.0;

/// Larger numbers, which measure nothing, are left out: an axis cannot be made of them.
const LARGEST: f64 = 1e100;

/// What is written around a picture.
#[derive(Clone, Debug)]
pub struct Labels<'a> {
    /// Above.
    pub title: &'a str,
    /// Below, with the unit.
    pub x: &'a str,
    /// To the left, with the unit.
    pub y: &'a str,
}

/// The picture with its own colours, those for light, for where no page gives them.
pub fn on_its_own(svg: &str) -> String {
    theme::light(svg)
}

/// Writes a picture whole or not at all.
///
/// # Errors
/// A line of text with the path.
pub fn write(path: &Path, svg: &str) -> Result<(), String> {
    let unfinished = path.with_extension("svg.tmp");
    let written = fs::write(&unfinished, on_its_own(svg)).and_then(|()| fs::rename(&unfinished, path));
    written.map_err(|error| {
        // What is left of it is of no use; the first error is the one to tell.
        let _ = fs::remove_file(&unfinished);
        format!("{}: {error}", path.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_whole_and_needs_no_page() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        write(&path, "<svg fill=\"var(--sheet)\"/>").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "<svg fill=\"#ffffff\"/>");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write(&folder.path().join("nowhere/loss.svg"), "").unwrap_err().contains("nowhere"));
    }
}
