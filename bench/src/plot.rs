//! Pictures of results, as SVG that is written here, element by element: two kinds of chart need no library.
//!
//! Colours are those of Okabe and Ito (2008), which people with any of the common kinds of colour blindness can tell apart; yellow, which
//! is hard to see on white, is left out.

use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Width of a picture in pixels; a picture of bars is as high as it must be.
const WIDTH: f64 = 960.0;

/// Height of a picture of lines.
const HEIGHT: f64 = 540.0;

/// Place above the plot, for the title.
const TOP: f64 = 54.0;

/// Place below it, for numbers and the name of the axis.
const BOTTOM: f64 = 62.0;

const PALETTE: [&str; 7] = ["#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7"];

/// What is written around a picture.
#[derive(Clone, Debug)]
pub(crate) struct Labels<'a> {
    /// Above.
    pub(crate) title: &'a str,
    /// Below, with the unit.
    pub(crate) x: &'a str,
    /// To the left, with the unit.
    pub(crate) y: &'a str,
}

/// One line of a [`lines`] picture.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    /// For the legend.
    pub(crate) name: String,
    /// In order of x; those that are not finite are left out.
    pub(crate) points: Vec<(f64, f64)>,
    /// Number of the colour, counted around the palette.
    pub(crate) colour: usize,
    /// Whether the line is dashed.
    pub(crate) dashed: bool,
    /// In pixels. Of lines that lie on each other all can be seen when later ones are thinner.
    pub(crate) width: f64,
}

/// Lines over a common axis, with a legend. Where x counts something, `marks` puts a mark on each point and labels whole numbers only.
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub(crate) fn lines(labels: &Labels<'_>, lines: &[Line], marks: bool) -> Result<String, String> {
    let lines: Vec<Line> = lines.iter().map(finite).filter(|line| !line.points.is_empty()).collect();
    let all = || lines.iter().flat_map(|line| line.points.iter());
    let (x_low, x_high) = range(all().map(|point| point.0));
    let (y_low, y_high) = range(all().map(|point| point.1));
    if lines.is_empty() {
        return Err(format!("nothing to draw in `{}`", labels.title));
    }
    // An axis of times begins where they do.
    let x_low = if !marks && x_low > 0.0 && x_low < 0.2 * x_high { 0.0 } else { x_low };
    // Differences of a thousandth are no more to be seen than they are to be believed.
    let air = (0.06 * (y_high - y_low)).max(0.002 * y_high.abs()).max(1e-9);
    let beside = if marks { 0.25 } else { 0.0 };
    let (left, right) = (88.0, 230.0);
    let plot = Plot {
        x: Axis { low: x_low - beside, high: (x_high + beside).max(x_low + 1e-9), from: left, to: WIDTH - right },
        y: Axis { low: y_low - air, high: y_high + air, from: HEIGHT - BOTTOM, to: TOP },
    };
    let mut svg = Svg::new(HEIGHT);
    svg.title(labels.title);
    for (value, label) in plot.y.ticks(7) {
        let y = plot.y.place(value);
        svg.rule((left, y), (plot.x.to, y));
        svg.text(&label, (left - 8.0, y), 13, Anchor::End);
    }
    for (value, label) in if marks { whole_numbers(x_low, x_high) } else { plot.x.ticks(8) } {
        let x = plot.x.place(value);
        if !marks {
            svg.rule((x, plot.y.from), (x, plot.y.to));
        }
        svg.text(&label, (x, plot.y.from + 16.0), 13, Anchor::Middle);
    }
    svg.frame(&plot);
    svg.text(labels.x, ((left + plot.x.to) / 2.0, HEIGHT - 18.0), 15, Anchor::Middle);
    svg.upwards(labels.y, (22.0, (plot.y.from + plot.y.to) / 2.0));
    for (index, line) in lines.iter().enumerate() {
        let points: Vec<(f64, f64)> = line.points.iter().map(|(x, y)| (plot.x.place(*x), plot.y.place(*y))).collect();
        svg.line(&points, line.colour, line.dashed, line.width);
        if marks {
            points.iter().for_each(|point| svg.dot(*point, 2.5 + line.width / 2.0, line.colour));
        }
        let y = TOP + 8.0 + 24.0 * index as f64;
        let x = plot.x.to + 16.0;
        svg.line(&[(x, y), (x + 32.0, y)], line.colour, line.dashed, 3.0);
        svg.text(&line.name, (x + 40.0, y), 14, Anchor::Start);
    }
    Ok(svg.finish())
}

/// Bars of a [`bars`] picture: horizontal, one group for each name.
#[derive(Clone, Debug)]
pub(crate) struct Bars<'a> {
    /// Above.
    pub(crate) title: &'a str,
    /// Below, with the unit.
    pub(crate) value: &'a str,
    /// Names of the values of a group, for the legend; of one alone there is none.
    pub(crate) parts: Vec<String>,
    /// Name of each group, and a value for each part; one that is missing or not finite has no bar.
    pub(crate) groups: Vec<(String, Vec<Option<f64>>)>,
    /// Whether the values of a group are put behind one another, rather than below.
    pub(crate) stacked: bool,
}

/// Draws bars, each with its value (the sum, where they are stacked).
///
/// # Errors
/// As [`lines`].
pub(crate) fn bars(bars: &Bars<'_>) -> Result<String, String> {
    let known = |value: &Option<f64>| value.filter(|value| value.is_finite() && *value >= 0.0);
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
    let x = Axis { low: 0.0, high: most * 1.12, from: left, to: WIDTH - right };
    let plot = Plot { x, y: Axis { low: 0.0, high: 1.0, from: height - BOTTOM, to: TOP } };
    let mut svg = Svg::new(height);
    svg.title(bars.title);
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

/// Writes a picture whole or not at all.
///
/// # Errors
/// A line of text with the path.
pub(crate) fn write(path: &Path, svg: &str) -> Result<(), String> {
    let unfinished = path.with_extension("svg.tmp");
    let written = fs::write(&unfinished, svg).and_then(|()| fs::rename(&unfinished, path));
    written.map_err(|error| {
        // What is left of it is of no use; the first error is the one to tell.
        let _ = fs::remove_file(&unfinished);
        format!("{}: {error}", path.display())
    })
}

/// The values that an axis covers, and the pixels at its ends.
#[derive(Clone, Copy, Debug)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn place(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// About `count` round values on the axis, with what is written beside them.
    fn ticks(&self, count: u32) -> Vec<(f64, String)> {
        let rough = (self.high - self.low) / f64::from(count);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil();
        // Twice as many as asked for would be a mistake, and no reason to go on for ever.
        (0..2 * count)
            .map(|index| (first + f64::from(index)) * step)
            .take_while(|value| *value <= self.high)
            .map(|value| (value, digits(value, step)))
            .collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Plot {
    x: Axis,
    y: Axis,
}

#[derive(Clone, Copy, Debug)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// The text of a picture as it grows.
struct Svg(String);

impl Svg {
    fn new(height: f64) -> Self {
        let mut svg = Svg(String::new());
        svg.add(format_args!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">"##
        ));
        svg.add(format_args!(r##"<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>"##));
        svg
    }

    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{element}");
    }

    fn title(&mut self, text: &str) {
        self.text(text, (WIDTH / 2.0, 26.0), 19, Anchor::Middle);
    }

    fn text(&mut self, text: &str, (x, y): (f64, f64), size: u32, anchor: Anchor) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        // Not every program knows how to centre text vertically.
        let baseline = y + 0.35 * f64::from(size);
        let text = escaped(text);
        self.add(format_args!(
            r##"<text x="{x:.1}" y="{baseline:.1}" font-size="{size}" text-anchor="{anchor}">{text}</text>"##
        ));
    }

    /// Text that is read from below.
    fn upwards(&mut self, text: &str, (x, y): (f64, f64)) {
        let text = escaped(text);
        self.add(format_args!(
            r##"<text transform="translate({x:.1} {y:.1}) rotate(-90)" font-size="15" text-anchor="middle">{text}</text>"##
        ));
    }

    /// A line of the grid.
    fn rule(&mut self, (x, y): (f64, f64), (to_x, to_y): (f64, f64)) {
        self.add(format_args!(r##"<path d="M{x:.1} {y:.1}L{to_x:.1} {to_y:.1}" stroke="#dddddd"/>"##));
    }

    /// The axes.
    fn frame(&mut self, plot: &Plot) {
        let Plot { x, y } = plot;
        self.add(format_args!(
            r##"<path d="M{:.1} {:.1}V{:.1}H{:.1}" stroke="#444444" fill="none"/>"##,
            x.from, y.to, y.from, x.to
        ));
    }

    fn line(&mut self, points: &[(f64, f64)], colour: usize, dashed: bool, width: f64) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let (points, colour) = (points.join(" "), self::colour(colour));
        let dashes = if dashed { r##" stroke-dasharray="7 4""## } else { "" };
        self.add(format_args!(
            r##"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dashes}/>"##
        ));
    }

    fn dot(&mut self, (x, y): (f64, f64), radius: f64, colour: usize) {
        let colour = self::colour(colour);
        self.add(format_args!(r##"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" fill="{colour}"/>"##));
    }

    fn bar(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), colour: usize) {
        let colour = self::colour(colour);
        self.add(format_args!(
            r##"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" fill="{colour}"/>"##
        ));
    }

    fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn colour(number: usize) -> &'static str {
    PALETTE[number % PALETTE.len()]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn finite(line: &Line) -> Line {
    let points = line.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    Line { points, ..line.clone() }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

/// The whole numbers of a range, a dozen at most.
fn whole_numbers(low: f64, high: f64) -> Vec<(f64, String)> {
    let (first, last) = (low.ceil(), high.floor());
    let step = ((last - first) / 12.0).ceil().max(1.0);
    (0..=12)
        .map(|index| first + f64::from(index) * step)
        .take_while(|value| *value <= last)
        .map(|value| (value, digits(value, 1.0)))
        .collect()
}

/// What stands behind a bar.
fn of_bar(value: f64, most: f64) -> String {
    digits(value, if value.fract() == 0.0 { 1.0 } else { most / 100.0 })
}

/// A number with as many digits as steps of this size need, thousands apart.
fn digits(value: f64, step: f64) -> String {
    // A step of 0.1 is a little less in binary.
    let decimals = (-(step.abs() * 1.000_001).log10().floor()).clamp(0.0, 6.0) as usize;
    let plain = format!("{value:.decimals$}");
    let (whole, rest) = plain.split_once('.').map_or((plain.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("-", whole));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(' ');
        }
        grouped.push(digit);
    }
    rest.map_or(format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_their_scale_needs() {
        assert_eq!(digits(12_345.6, 1_000.0), "12 346");
        assert_eq!(digits(-1_234_567.0, 1.0), "-1 234 567");
        assert_eq!(digits(0.123_456, 0.01), "0.12");
        assert_eq!(digits(5.0, 0.25), "5.0");
        assert_eq!(digits(0.3, 0.1), "0.3");
        assert_eq!(digits(999.0, 0.0), "999.000000");
    }

    #[test]
    fn axes_are_labelled_with_round_numbers() {
        let axis = |low, high| Axis { low, high, from: 0.0, to: 100.0 };
        let labels = |axis: Axis| axis.ticks(5).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(axis(0.0, 1.0)), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(axis(2.9, 5.6)), ["3", "4", "5"]);
        assert_eq!(labels(axis(0.0, 23_000.0)), ["0", "5 000", "10 000", "15 000", "20 000"]);
        assert_eq!(axis(0.0, 4.0).place(1.0), 25.0);
        assert_eq!(whole_numbers(1.0, 3.0).len(), 3);
        assert!(whole_numbers(1.0, 1000.0).len() <= 13);
    }

    #[test]
    fn a_picture_says_what_it_shows() {
        let labels = Labels { title: "Loss <against> time", x: "time (s)", y: "loss (nats)" };
        let line = |name: &str, colour, dashed| Line {
            name: name.into(),
            points: vec![(0.0, 5.0), (1.0, f64::NAN), (2.0, 3.0)],
            colour,
            dashed,
            width: 2.0,
        };
        let svg = lines(&labels, &[line("ps", 1, false), line("ring", 2, true)], false).unwrap();
        for part in ["Loss &lt;against&gt; time", "time (s)", "loss (nats)", "ps", "ring", "</svg>"] {
            assert!(svg.contains(part), "{part} is missing from {svg}");
        }
        assert!(!svg.contains("NaN"), "{svg}");
        assert!(lines(&labels, &[], false).is_err());
    }

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

    #[test]
    fn a_file_is_written_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loss.svg");
        write(&path, "<svg/>").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "<svg/>");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write(&folder.path().join("nowhere/loss.svg"), "").unwrap_err().contains("nowhere"));
    }
}
