//! Bars of parts that follow one another, in panels one below the other.

use super::LARGEST;
use super::axis::{Axis, digits};
use super::svg::{Anchor, Svg, clipped};
use super::theme::colour;

/// Width of the picture: narrow enough for half a page.
const WIDE: f64 = 800.0;

/// Place for the names of bars.
const LEFT: f64 = 150.0;

const THICKNESS: f64 = 15.0;

/// From one bar to the next.
const EACH: f64 = 21.0;

/// Above a panel's bars, for its name.
const HEAD: f64 = 34.0;

/// Below a panel's bars, for its numbers.
const FOOT: f64 = 28.0;

/// By how much the longest bars of two panels may differ for the panels to have one scale.
const ONE_SCALE: f64 = 8.0;

/// What a [`panels`] picture shows.
#[derive(Clone, Debug)]
pub struct Panels<'a> {
    /// Above.
    pub title: &'a str,
    /// The unit of the values.
    pub unit: &'a str,
    /// Names of the parts, in order, the number of the colour of each, and whether it is hatched.
    pub parts: Vec<(String, usize, bool)>,
    pub panels: Vec<Panel>,
}

/// Bars that are compared first of all.
#[derive(Clone, Debug)]
pub struct Panel {
    pub name: String,
    /// Name, and a value for each part; what is not finite or below 0 counts as 0.
    pub bars: Vec<(String, Vec<f64>)>,
}

/// Draws the panels, each bar with its sum. All have one scale, unless some would be too short to be read.
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub fn panels(picture: &Panels<'_>) -> Result<String, String> {
    let drawn: Vec<(&Panel, f64)> =
        picture.panels.iter().map(|panel| (panel, longest(panel))).filter(|(_, most)| *most > 0.0).collect();
    let most = drawn.iter().map(|(_, most)| *most).fold(0.0, f64::max);
    let least = drawn.iter().map(|(_, most)| *most).fold(f64::INFINITY, f64::min);
    if drawn.is_empty() {
        return Err(format!("nothing to draw in `{}`", picture.title));
    }
    let own_scales = most > ONE_SCALE * least;
    let legend = legend(picture);
    let note = if own_scales { 22.0 } else { 0.0 };
    let top = 48.0 + note + 22.0 * legend.len() as f64;
    let height: f64 = drawn.iter().map(|(panel, _)| HEAD + EACH * panel.bars.len() as f64 + FOOT).sum();
    let names: Vec<&str> = drawn.iter().map(|(panel, _)| panel.name.as_str()).collect();
    let description = format!("Stacked bars for {}; the same figures stand in tables on the page.", names.join(", "));
    let mut svg = Svg::new((WIDE, top + height + 8.0), picture.title, &description);
    if own_scales {
        svg.text(&format!("each with a scale of its own, in {}", picture.unit), (12.0, 48.0), 13, Anchor::Start);
    }
    for (line, entries) in legend.iter().enumerate() {
        for (part, x) in entries {
            let (y, (name, number, hatched)) = (52.0 + note + 22.0 * line as f64, &picture.parts[*part]);
            area(&mut svg, ((*x, y - 7.0), (14.0, 14.0)), *number, *hatched, "");
            svg.text(name, (x + 20.0, y), 13, Anchor::Start);
        }
    }
    let mut at = top;
    for (panel, own) in drawn {
        let x = Axis::linear((0.0, 1.12 * if own_scales { own } else { most }), (LEFT, WIDE - 16.0));
        svg.text(&panel.name, (12.0, at + HEAD / 2.0), 15, Anchor::Start);
        at = draw(&mut svg, picture, panel, &x, at + HEAD) + FOOT;
    }
    Ok(svg.finish())
}

/// The bars of a panel from `top` on, and its numbers; where the bars end.
fn draw(svg: &mut Svg, picture: &Panels<'_>, panel: &Panel, x: &Axis, top: f64) -> f64 {
    let bottom = top + EACH * panel.bars.len() as f64;
    let longest = longest(panel);
    for (value, label) in x.ticks(6) {
        let place = x.place(value);
        svg.rule((place, top - 3.0), (place, bottom));
        svg.text(&label, (place, bottom + 11.0), 12, Anchor::Middle);
    }
    for (index, (bar, values)) in panel.bars.iter().enumerate() {
        let y = top + EACH * index as f64;
        svg.text(&clipped(bar, LEFT - 14.0, 13), (LEFT - 8.0, y + THICKNESS / 2.0), 13, Anchor::End);
        let total = sum(values);
        let mut start = 0.0;
        for ((name, number, hatched), value) in picture.parts.iter().zip(values.iter().copied().map(known)) {
            let (from, to) = (x.place(start), x.place(start + value));
            let tip = format!("{bar}, {name}: {} {}", digits(value, longest / 1000.0), picture.unit);
            if to - from >= 0.2 {
                area(svg, ((from, y), (to - from, THICKNESS)), *number, *hatched, &tip);
            }
            start += value;
        }
        let sum = format!("{} {}", digits(total, longest / 100.0), picture.unit);
        svg.text(&sum, (x.place(total) + 5.0, y + THICKNESS / 2.0), 12, Anchor::Start);
    }
    bottom
}

/// The longest bar's sum.
fn longest(panel: &Panel) -> f64 {
    panel.bars.iter().map(|(_, values)| sum(values)).fold(0.0, f64::max)
}

fn known(value: f64) -> f64 {
    if value.abs() < LARGEST { value.max(0.0) } else { 0.0 }
}

fn sum(values: &[f64]) -> f64 {
    values.iter().copied().map(known).sum()
}

fn area(svg: &mut Svg, (at, size): ((f64, f64), (f64, f64)), number: usize, hatched: bool, tip: &str) {
    svg.area(at, size, &colour(number), tip);
    if hatched {
        svg.hatch(at, size, "var(--sheet)");
    }
}

/// The legend's lines: numbers of parts, and where each stands.
fn legend(picture: &Panels<'_>) -> Vec<Vec<(usize, f64)>> {
    let mut lines = vec![Vec::new()];
    let mut x = 12.0;
    for (part, (name, ..)) in picture.parts.iter().enumerate() {
        let wide = 40.0 + 7.0 * name.chars().count() as f64;
        if x + wide > WIDE && x > 12.0 {
            lines.push(Vec::new());
            x = 12.0;
        }
        if let Some(line) = lines.last_mut() {
            line.push((part, x));
        }
        x += wide;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(second: f64) -> Panels<'static> {
        let panel = |name: &str, ms: f64| Panel {
            name: name.into(),
            bars: vec![("ddp".into(), vec![30.0, ms]), ("ps".into(), vec![f64::NAN, -1.0])],
        };
        Panels {
            title: "A step",
            unit: "ms",
            parts: vec![("computing".into(), 4, false), ("waiting".into(), 5, true)],
            panels: vec![panel("lan", 12.0), panel("wan", second)],
        }
    }

    #[test]
    fn panels_share_a_scale_unless_one_would_be_too_short() {
        let svg = panels(&picture(100.0)).unwrap();
        for text in ["computing", "waiting", "42.0 ms", "130 ms", "ddp, waiting: 12.00 ms", ">lan<", ">wan<"] {
            assert!(svg.contains(text), "{text} is missing from {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("a scale of its own"), "{svg}");
        assert!(panels(&picture(5_000.0)).unwrap().contains("each with a scale of its own, in ms"));
        assert!(panels(&Panels { panels: Vec::new(), ..picture(1.0) }).unwrap_err().contains("A step"));
    }
}
