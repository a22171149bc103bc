//! Lines over a common axis.

use super::axis::{Axis, range, whole_numbers};
use super::svg::{Anchor, Plot, Svg};
use super::{BOTTOM, LARGEST, Labels, TOP, WIDTH};

/// Height of a picture of lines, unless its legend needs more.
const HEIGHT: f64 = 540.0;

/// What a line of the legend takes.
const LEGEND: f64 = 24.0;

/// Pixels between lines whose points would stand above one another.
const DODGE: f64 = 7.0;

/// One line of a [`lines`] picture.
#[derive(Clone, Debug)]
pub struct Line {
    /// For the legend.
    pub name: String,
    /// In order of x; those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
    /// Number of the colour, counted around the palette.
    pub colour: usize,
    /// Whether the line is dashed.
    pub dashed: bool,
    /// In pixels. Of lines that lie on each other all can be seen when later ones are thinner.
    pub width: f64,
}

/// One line of a [`curves`] picture.
#[derive(Clone, Debug)]
pub struct Curve {
    /// For the legend.
    pub name: String,
    /// In order of x; those that are not finite are left out.
    pub points: Vec<Point>,
    /// Number of the colour, counted around the palette.
    pub colour: usize,
    pub dashed: bool,
    /// In pixels; 0 for marks without a line.
    pub width: f64,
    /// Number of the shape of the marks; `None` without marks.
    pub mark: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    /// The least and the most that y may be.
    pub interval: Option<(f64, f64)>,
}

/// How the axes of a [`curves`] picture go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scale {
    /// By ratios instead of differences; points that are not above 0 are left out.
    pub log_x: bool,
    pub log_y: bool,
    /// The values of x that are labelled, instead of round ones.
    pub whole_x: bool,
    /// Whether the axis of y begins at 0.
    pub from_zero: bool,
}

/// Lines over a common axis, with a legend. Where x counts something, `marks` puts a mark on each point and labels whole numbers only.
///
/// # Errors
/// A line of text, where there is nothing to draw.
pub fn lines(labels: &Labels<'_>, lines: &[Line], marks: bool) -> Result<String, String> {
    let curve = |line: &Line| Curve {
        name: line.name.clone(),
        points: line.points.iter().map(|(x, y)| Point { x: *x, y: *y, interval: None }).collect(),
        colour: line.colour,
        dashed: line.dashed,
        width: line.width,
        mark: marks.then_some(0),
    };
    let curves: Vec<Curve> = lines.iter().map(curve).collect();
    self::curves(labels, &curves, Scale { whole_x: marks, ..Scale::default() })
}

/// Lines with intervals at their points, on linear or logarithmic axes.
///
/// # Errors
/// As [`lines`].
pub fn curves(labels: &Labels<'_>, curves: &[Curve], scale: Scale) -> Result<String, String> {
    let curves: Vec<Curve> =
        curves.iter().map(|curve| known(curve, scale)).filter(|curve| !curve.points.is_empty()).collect();
    if curves.is_empty() {
        return Err(format!("nothing to draw in `{}`", labels.title));
    }
    let height = HEIGHT.max(TOP + LEGEND * curves.len() as f64 + 20.0);
    let (left, right) = (88.0, 230.0);
    let (x_range, plot) = plot(&curves, scale, (left, WIDTH - right), (height - BOTTOM, TOP));
    let names: Vec<&str> = curves.iter().map(|curve| curve.name.as_str()).collect();
    let description = format!("{} against {}: {}", labels.y, labels.x, names.join(", "));
    let mut svg = Svg::new((WIDTH, height), labels.title, &description);
    for (value, label) in plot.y.ticks(7) {
        let y = plot.y.place(value);
        svg.rule((left, y), (plot.x.to, y));
        svg.text(&label, (left - 8.0, y), 13, Anchor::End);
    }
    for (value, label) in if scale.whole_x { whole_numbers(x_range.0, x_range.1) } else { plot.x.ticks(8) } {
        let x = plot.x.place(value);
        if !scale.whole_x {
            svg.rule((x, plot.y.from), (x, plot.y.to));
        }
        svg.text(&label, (x, plot.y.from + 16.0), 13, Anchor::Middle);
    }
    svg.frame(&plot);
    svg.text(labels.x, ((left + plot.x.to) / 2.0, height - 18.0), 15, Anchor::Middle);
    svg.upwards(labels.y, (22.0, (plot.y.from + plot.y.to) / 2.0));
    for (index, curve) in curves.iter().enumerate() {
        // Intervals at the same whole number would hide one another.
        let dodges =
            scale.whole_x && curves.iter().any(|curve| curve.points.iter().any(|point| point.interval.is_some()));
        let aside = if dodges { DODGE * (index as f64 - (curves.len() - 1) as f64 / 2.0) } else { 0.0 };
        draw(&mut svg, curve, &plot, aside);
        let y = TOP + 8.0 + LEGEND * index as f64;
        let x = plot.x.to + 16.0;
        if curve.width > 0.0 {
            svg.line(&[(x, y), (x + 32.0, y)], curve.colour, curve.dashed, 3.0);
        }
        if let Some(shape) = curve.mark {
            svg.mark((x + 16.0, y), 4.5, curve.colour, shape);
        }
        svg.text(&curve.name, (x + 40.0, y), 14, Anchor::Start);
    }
    Ok(svg.finish())
}

/// The axes that hold all points, and the range of x.
fn plot(curves: &[Curve], scale: Scale, width: (f64, f64), height: (f64, f64)) -> ((f64, f64), Plot) {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let (x_low, x_high) = range(all().map(|point| point.x));
    let ends = |point: &Point| {
        let (low, high) = point.interval.unwrap_or((point.y, point.y));
        [low, point.y, high]
    };
    let (y_low, y_high) = range(all().flat_map(ends));
    // An axis of times begins where they do.
    let x_low = if !scale.whole_x && !scale.log_x && x_low > 0.0 && x_low < 0.2 * x_high { 0.0 } else { x_low };
    let beside = if scale.whole_x { 0.25 } else { 0.0 };
    let x = if scale.log_x {
        Axis::log((x_low * 0.9, x_high * 1.1), width)
    } else {
        Axis::linear((x_low - beside, x_high + beside), width)
    };
    let y = if scale.log_y {
        Axis::log((y_low * 0.85, y_high * 1.18), height)
    } else {
        // Differences of a thousandth are no more to be seen than they are to be believed.
        let air = (0.06 * (y_high - y_low)).max(0.002 * y_high.abs()).max(1e-9);
        Axis::linear((if scale.from_zero { y_low.min(0.0) } else { y_low - air }, y_high + air), height)
    };
    ((x_low, x_high), Plot { x, y })
}

fn draw(svg: &mut Svg, curve: &Curve, plot: &Plot, aside: f64) {
    let place = |point: &Point| (plot.x.place(point.x) + aside, plot.y.place(point.y));
    let points: Vec<(f64, f64)> = curve.points.iter().map(place).collect();
    if curve.width > 0.0 {
        svg.line(&points, curve.colour, curve.dashed, curve.width);
    }
    for (point, at) in curve.points.iter().zip(&points) {
        if let Some((low, high)) = point.interval {
            svg.whisker(at.0, (plot.y.place(low), plot.y.place(high)), curve.colour);
        }
        if let Some(shape) = curve.mark {
            svg.mark(*at, 2.5 + curve.width / 2.0, curve.colour, shape);
        }
    }
}

/// The line with those points alone that its axes can show.
fn known(curve: &Curve, scale: Scale) -> Curve {
    let shown = |value: f64, log: bool| value.abs() < LARGEST && (!log || value > 0.0);
    let points = curve.points.iter().filter(|point| shown(point.x, scale.log_x) && shown(point.y, scale.log_y));
    let interval =
        |point: &Point| point.interval.filter(|(low, high)| shown(*low, scale.log_y) && shown(*high, scale.log_y));
    let points = points.map(|point| Point { interval: interval(point), ..*point }).collect();
    Curve { points, ..curve.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LABELS: Labels<'_> = Labels { title: "Loss <against> time", x: "time (s)", y: "loss (nats)" };

    #[test]
    fn a_picture_says_what_it_shows() {
        let line = |name: &str, colour, dashed| Line {
            name: name.into(),
            points: vec![(0.0, 5.0), (1.0, f64::NAN), (2.0, 3.0)],
            colour,
            dashed,
            width: 2.0,
        };
        let svg = lines(&LABELS, &[line("ps", 1, false), line("ring", 2, true)], false).unwrap();
        for part in ["Loss &lt;against&gt; time", "time (s)", "loss (nats)", "ps", "ring", "</svg>"] {
            assert!(svg.contains(part), "{part} is missing from {svg}");
        }
        assert!(!svg.contains("NaN"), "{svg}");
        assert!(lines(&LABELS, &[], false).is_err());
    }

    #[test]
    fn logarithmic_axes_leave_out_what_they_cannot_show() {
        let point = |x, y, interval| Point { x, y, interval };
        let curve = |points| Curve { name: "a".into(), points, colour: 1, dashed: false, width: 2.0, mark: Some(1) };
        let scale = Scale { log_x: true, log_y: true, ..Scale::default() };
        let points = vec![point(0.0, 1.0, None), point(10.0, 1.0, Some((0.0, 2.0))), point(100.0, f64::INFINITY, None)];
        let svg = curves(&LABELS, &[curve(points)], scale).unwrap();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(curves(&LABELS, &[curve(vec![point(-1.0, 1.0, None)])], scale).is_err());
    }
}
