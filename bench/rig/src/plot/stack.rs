//! Bars of parts that follow one another, each with what went on behind it.

use super::axis::{Axis, digits};
use super::svg::{Anchor, Plot, Svg, clipped};
use super::theme::colour;
use super::{BOTTOM, LARGEST, WIDTH};

const THICKNESS: f64 = 24.0;

/// Of the bar that shows what went on behind.
const BEHIND: f64 = 7.0;

const LEFT: f64 = 200.0;

/// What a [`stack`] picture shows.
#[derive(Clone, Debug)]
pub struct Stack<'a> {
    /// Above.
    pub title: &'a str,
    /// Below, with the unit.
    pub value: &'a str,
    /// Names of the parts, in order, the number of the colour of each, and whether it is hatched.
    pub parts: Vec<(String, usize, bool)>,
    /// Name of what goes on behind, for the legend.
    pub behind: &'a str,
    pub groups: Vec<Group>,
}

/// One bar.
#[derive(Clone, Debug)]
pub struct Group {
    pub name: String,
    /// One for each part; what is not finite or below 0 counts as 0.
    pub values: Vec<f64>,
    pub behind: f64,
}

/// Draws the bars, each with its sum.
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub fn stack(stack: &Stack<'_>) -> Result<String, String> {
    let known = |value: f64| if value.abs() < LARGEST { value.max(0.0) } else { 0.0 };
    let sum = |group: &Group| group.values.iter().copied().map(known).sum::<f64>();
    let most = stack.groups.iter().map(|group| sum(group).max(known(group.behind))).fold(0.0, f64::max);
    if most <= 0.0 {
        return Err(format!("nothing to draw in `{}`", stack.title));
    }
    let legend = legend(stack);
    let top = 54.0 + 24.0 * legend.len() as f64;
    let each = THICKNESS + BEHIND + 12.0;
    let height = top + each * stack.groups.len() as f64 + BOTTOM;
    let x = Axis::linear((0.0, most * 1.1), (LEFT, WIDTH - 20.0));
    let plot = Plot { x, y: Axis::linear((0.0, 1.0), (height - BOTTOM, top)) };
    let names: Vec<&str> = stack.groups.iter().map(|group| group.name.as_str()).collect();
    let description = format!("Stacked bars of {}; the same figures stand in a table on the page.", names.join(", "));
    let mut svg = Svg::new((WIDTH, height), stack.title, &description);
    for (line, entries) in legend.iter().enumerate() {
        for (entry, x) in entries {
            let y = 54.0 + 24.0 * line as f64;
            match entry {
                Some(part) => {
                    let (name, number, hatched) = &stack.parts[*part];
                    area(&mut svg, ((*x, y - 7.0), (14.0, 14.0)), *number, *hatched, "");
                    svg.text(name, (x + 20.0, y), 13, Anchor::Start);
                }
                None => {
                    area(&mut svg, ((*x, y - 3.0), (14.0, BEHIND)), 7, true, "");
                    svg.text(stack.behind, (x + 20.0, y), 13, Anchor::Start);
                }
            }
        }
    }
    for (value, label) in plot.x.ticks(8) {
        let x = plot.x.place(value);
        svg.rule((x, plot.y.from), (x, plot.y.to));
        svg.text(&label, (x, plot.y.from + 16.0), 13, Anchor::Middle);
    }
    svg.frame(&plot);
    svg.text(stack.value, ((LEFT + plot.x.to) / 2.0, height - 18.0), 15, Anchor::Middle);
    for (index, group) in stack.groups.iter().enumerate() {
        let top = top + 6.0 + each * index as f64;
        let name = clipped(&group.name, LEFT - 14.0, 13);
        svg.text(&name, (LEFT - 8.0, top + THICKNESS / 2.0), 13, Anchor::End);
        let mut start = 0.0;
        for ((name, number, hatched), value) in stack.parts.iter().zip(group.values.iter().copied().map(known)) {
            let (from, to) = (plot.x.place(start), plot.x.place(start + value));
            let tip = format!("{}: {name} {}", group.name, digits(value, most / 1000.0));
            if to - from >= 0.2 {
                area(&mut svg, ((from, top), (to - from, THICKNESS)), *number, *hatched, &tip);
            }
            start += value;
        }
        let end = (plot.x.place(start) + 5.0, top + THICKNESS / 2.0);
        svg.text(&digits(start, most / 1000.0), end, 12, Anchor::Start);
        let behind = known(group.behind);
        if behind > 0.0 {
            let tip = format!("{}: {} {}", group.name, stack.behind, digits(behind, most / 1000.0));
            let width = plot.x.place(behind) - LEFT;
            area(&mut svg, ((LEFT, top + THICKNESS + 1.0), (width, BEHIND)), 7, true, &tip);
        }
    }
    Ok(svg.finish())
}

fn area(svg: &mut Svg, (at, size): ((f64, f64), (f64, f64)), number: usize, hatched: bool, tip: &str) {
    svg.area(at, size, &colour(number), tip);
    if hatched {
        svg.hatch(at, size, "var(--sheet)");
    }
}

/// The legend's lines: numbers of parts, `None` for what goes on behind, and where each stands.
fn legend(stack: &Stack<'_>) -> Vec<Vec<(Option<usize>, f64)>> {
    let mut lines = vec![Vec::new()];
    let mut x = LEFT;
    let names = stack.parts.iter().enumerate().map(|(part, (name, _, _))| (Some(part), name.as_str()));
    for (entry, name) in names.chain([(None, stack.behind)]) {
        let wide = 44.0 + 7.0 * name.chars().count() as f64;
        if x + wide > WIDTH && x > LEFT {
            lines.push(Vec::new());
            x = LEFT;
        }
        if let Some(line) = lines.last_mut() {
            line.push((entry, x));
        }
        x += wide;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_and_what_is_unknown_is_nothing() {
        let group = |name: &str, values: Vec<f64>, behind| Group { name: name.into(), values, behind };
        let picture = Stack {
            title: "A step",
            value: "ms",
            parts: vec![("compute".into(), 4, false), ("exposed".into(), 5, true)],
            behind: "hidden",
            groups: vec![group("ddp", vec![30.0, 12.0], 8.0), group("ps", vec![f64::NAN, -1.0], f64::NAN)],
        };
        let svg = stack(&picture).unwrap();
        for part in ["compute", "exposed", "hidden", "42.0", "ddp: exposed 12.00"] {
            assert!(svg.contains(part), "{part} is missing from {svg}");
        }
        assert!(!svg.contains("NaN"), "{svg}");
        assert!(stack(&Stack { groups: vec![group("ps", vec![0.0, 0.0], 0.0)], ..picture }).is_err());
    }
}
