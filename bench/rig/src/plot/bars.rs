//! Horizontal bars.

use super::axis::{Axis, digits};
use super::svg::{Anchor, Plot, Svg};
use super::{BOTTOM, LARGEST, TOP, WIDTH};

/// Bars of a [`bars`] picture: horizontal, one group for each name.
#[derive(Clone, Debug)]
pub struct Bars<'a> {
    /// Above.
    pub title: &'a str,
    /// Below, with the unit.
    pub value: &'a str,
    /// Names of the values of a group, for the legend; of one alone there is none.
    pub parts: Vec<String>,
    /// Name of each group, and a value for each part; one that is missing or not finite has no bar.
    pub groups: Vec<(String, Vec<Option<f64>>)>,
    /// Whether the values of a group are put behind one another, rather than below.
    pub stacked: bool,
}

/// Draws bars, each with its value (the sum, where they are stacked).
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub fn bars(bars: &Bars<'_>) -> Result<String, String> {
    let known = |value: &Option<f64>| value.filter(|value| (0.0..LARGEST).contains(value));
    let longest = |(_, values): &(String, Vec<Option<f64>>)| {
        let known = values.iter().filter_map(known);
        if bars.stacked { known.sum::<f64>() } else { known.fold(0.0, f64::max) }
    };
    let most = bars.groups.iter().map(longest).fold(0.0, f64::max);
    if most <= 0.0 {
        return Err(format!("nothing to draw in `{}`", bars.title));
    }
    let several = bars.parts.len() > 1;
    let below = if bars.stacked { 1 } else { bars.parts.len().max(1) };
    let thickness = if below == 1 { 22.0 } else { 16.0 };
    let heights: Vec<f64> = bars
        .groups
        .iter()
        .map(|(_, values)| thickness * if bars.stacked { 1.0 } else { values.len().max(1) as f64 })
        .collect();
    let height = TOP + heights.iter().map(|height| height + 12.0).sum::<f64>() + BOTTOM;
    let left = 190.0;
    let right = if several { 190.0 } else { 30.0 };
    // Behind the longest bar there is place for its number.
    let x = Axis::linear((0.0, most * 1.12), (left, WIDTH - right));
    let plot = Plot { x, y: Axis::linear((0.0, 1.0), (height - BOTTOM, TOP)) };
    let mut svg = Svg::new((WIDTH, height), bars.title, "");
    for (value, label) in plot.x.ticks(8) {
        let x = plot.x.place(value);
        svg.rule((x, plot.y.from), (x, plot.y.to));
        svg.text(&label, (x, plot.y.from + 16.0), 13, Anchor::Middle);
    }
    svg.frame(&plot);
    svg.text(bars.value, ((left + plot.x.to) / 2.0, height - 18.0), 15, Anchor::Middle);
    let mut top = TOP + 6.0;
    for ((name, values), height) in bars.groups.iter().zip(&heights) {
        svg.text(name, (left - 8.0, top + height / 2.0), 14, Anchor::End);
        let mut start = 0.0;
        for (part, value) in values.iter().enumerate() {
            let Some(value) = known(value) else { continue };
            let upper = if bars.stacked { top } else { top + thickness * part as f64 };
            let (from, to) = (plot.x.place(start), plot.x.place(start + value));
            let colour = if several { part + 1 } else { 4 };
            svg.bar((from, upper), (to - from, thickness - 1.0), colour);
            if bars.stacked {
                start += value;
            } else {
                svg.text(&of_bar(value, most), (to + 5.0, upper + thickness / 2.0), 12, Anchor::Start);
            }
        }
        if bars.stacked && start > 0.0 {
            let at = (plot.x.place(start) + 5.0, top + thickness / 2.0);
            svg.text(&of_bar(start, most), at, 12, Anchor::Start);
        }
        top += height + 12.0;
    }
    for (part, name) in bars.parts.iter().enumerate().filter(|_| several) {
        let y = TOP + 8.0 + 24.0 * part as f64;
        let x = plot.x.to + 16.0;
        svg.bar((x, y - 7.0), (14.0, 14.0), part + 1);
        svg.text(name, (x + 22.0, y), 14, Anchor::Start);
    }
    Ok(svg.finish())
}

/// What stands behind a bar.
fn of_bar(value: f64, most: f64) -> String {
    digits(value, if value.fract() == 0.0 { 1.0 } else { most / 100.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_carry_their_values_and_leave_out_what_is_missing() {
        let picture = |stacked| Bars {
            title: "Memory",
            value: "MB",
            parts: vec!["parameters".into(), "gradients".into()],
            groups: vec![("ps".into(), vec![Some(1_000.0), Some(500.0)]), ("ring".into(), vec![None, Some(f64::NAN)])],
            stacked,
        };
        let svg = bars(&picture(true)).unwrap();
        assert!(svg.contains("1 500") && svg.contains("ring") && svg.contains("gradients"), "{svg}");
        let svg = bars(&picture(false)).unwrap();
        assert!(svg.contains("1 000") && svg.contains("500"), "{svg}");
        assert!(bars(&Bars { groups: Vec::new(), ..picture(true) }).is_err());
    }
}
