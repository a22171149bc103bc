//! Heat maps: a square for each row and column, darker the worse it is, with its figures in it.

use super::svg::{Anchor, Svg};
use super::theme::{SHADES, shade};

/// A square's size.
const SQUARE: (f64, f64) = (126.0, 58.0);

/// Place for the names of rows.
const LEFT: f64 = 130.0;

/// Place for the title and the names of columns.
const TOP: f64 = 84.0;

/// Place for the legend.
const BOTTOM: f64 = 66.0;

/// Ratios from which on each shade but the first begins.
const FROM: [f64; SHADES - 1] = [1.02, 1.1, 1.25, 1.5, 2.0, 4.0];

/// What a [`heat`] picture shows.
#[derive(Clone, Debug)]
pub struct Heat<'a> {
    /// Above.
    pub title: &'a str,
    /// What a ratio is to, for the legend.
    pub ratio: &'a str,
    pub columns: Vec<String>,
    pub rows: Vec<(String, Vec<Square>)>,
}

/// One place of a heat map.
#[derive(Clone, Debug, PartialEq)]
pub enum Square {
    /// Figures, in up to three lines, and how many times the best of them this is.
    Value { ratio: f64, lines: Vec<String>, tip: String },
    /// What should be here and is not: a word, and why.
    Hole { word: String, why: String },
    /// Nothing was to be here.
    Empty,
}

/// Draws the map.
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub fn heat(heat: &Heat<'_>) -> Result<String, String> {
    let filled = heat.rows.iter().flat_map(|(_, squares)| squares).any(|square| *square != Square::Empty);
    if heat.columns.is_empty() || !filled {
        return Err(format!("nothing to draw in `{}`", heat.title));
    }
    let width = (LEFT + SQUARE.0 * heat.columns.len() as f64 + 12.0).max(560.0);
    let bottom = TOP + SQUARE.1 * heat.rows.len() as f64;
    let description = "A table of squares; the same figures stand in a table on the page.";
    let mut svg = Svg::new((width, bottom + BOTTOM), heat.title, description);
    let left = |column: usize| LEFT + SQUARE.0 * column as f64;
    for (column, name) in heat.columns.iter().enumerate() {
        let name = super::svg::clipped(name, SQUARE.0 - 6.0, 13);
        svg.text(&name, (left(column) + SQUARE.0 / 2.0, TOP - 16.0), 13, Anchor::Middle);
    }
    for (row, (name, squares)) in heat.rows.iter().enumerate() {
        let top = TOP + SQUARE.1 * row as f64;
        let name = super::svg::clipped(name, LEFT - 14.0, 14);
        svg.text(&name, (LEFT - 10.0, top + SQUARE.1 / 2.0), 14, Anchor::End);
        for (column, square) in squares.iter().enumerate().take(heat.columns.len()) {
            draw(&mut svg, square, (left(column) + 1.0, top + 1.0), (SQUARE.0 - 2.0, SQUARE.1 - 2.0));
        }
    }
    legend(&mut svg, heat.ratio, bottom + 14.0);
    Ok(svg.finish())
}

fn draw(svg: &mut Svg, square: &Square, at: (f64, f64), size: (f64, f64)) {
    let middle = at.0 + size.0 / 2.0;
    match square {
        Square::Empty => {}
        Square::Hole { word, why } => {
            svg.area(at, size, "var(--hole)", why);
            svg.hatch(at, size, "var(--soft)");
            let word = super::svg::clipped(word, size.0 - 16.0, 13);
            // Letters on lines cannot be read.
            let half = 4.2 * word.chars().count() as f64;
            svg.area((middle - half, at.1 + size.1 / 2.0 - 10.0), (2.0 * half, 20.0), "var(--hole)", why);
            svg.coloured(&word, (middle, at.1 + size.1 / 2.0), 13, Anchor::Middle, "var(--ink)");
        }
        Square::Value { ratio, lines, tip } => {
            let (ground, ink) = shade(FROM.iter().filter(|from| *ratio >= **from).count());
            svg.area(at, size, &ground, tip);
            let step = 17.0;
            let first = at.1 + size.1 / 2.0 - step * (lines.len().saturating_sub(1)) as f64 / 2.0;
            for (index, line) in lines.iter().enumerate() {
                let size = if index == 0 { 15 } else { 11 };
                svg.coloured(line, (middle, first + step * index as f64), size, Anchor::Middle, &ink);
            }
        }
    }
}

fn legend(svg: &mut Svg, ratio: &str, top: f64) {
    let wide = 52.0;
    svg.text(ratio, (LEFT, top + 38.0), 12, Anchor::Start);
    for number in 0..SHADES {
        let x = LEFT + wide * number as f64;
        let (ground, ink) = shade(number);
        svg.area((x, top), (wide, 20.0), &ground, "");
        let from =
            number.checked_sub(1).and_then(|number| FROM.get(number)).map_or("1×".into(), |from| format!("≥ {from}×"));
        svg.coloured(&from, (x + wide / 2.0, top + 10.0), 11, Anchor::Middle, &ink);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_have_their_figures_and_holes_their_reasons() {
        let value = |ratio: f64| Square::Value { ratio, lines: vec![format!("{ratio} ms")], tip: "tip".into() };
        let hole = Square::Hole { word: "failed".into(), why: "rank 1: <lost>".into() };
        let picture = Heat {
            title: "Step time",
            ratio: "to the best",
            columns: vec!["tcp".into(), "quic".into()],
            rows: vec![("ddp".into(), vec![value(1.0), hole]), ("ps".into(), vec![value(9.0), Square::Empty])],
        };
        let svg = heat(&picture).unwrap();
        for part in ["var(--s0)", "var(--s6)", "9 ms", "failed", "rank 1: &lt;lost&gt;", "to the best"] {
            assert!(svg.contains(part), "{part} is missing from {svg}");
        }
        let empty = vec![("ddp".into(), vec![Square::Empty])];
        assert!(heat(&Heat { rows: empty, ..picture }).is_err());
    }
}
