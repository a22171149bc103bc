//! SVG, written element by element. Colours are names, which [`theme`](super::theme) knows.

use std::fmt::{Arguments, Write};

use super::axis::Axis;
use super::theme::colour;

/// The ends of the two axes of a plot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plot {
    pub(super) x: Axis,
    pub(super) y: Axis,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// The text of a picture as it grows.
pub(super) struct Svg {
    text: String,
    width: f64,
}

impl Svg {
    /// An empty picture; `description` is for those who cannot see it.
    pub(super) fn new((width, height): (f64, f64), title: &str, description: &str) -> Self {
        let mut svg = Svg { text: String::new(), width };
        let name = escaped(title);
        svg.add(format_args!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{name}" font-family="Helvetica, Arial, sans-serif">"##
        ));
        if !description.is_empty() {
            svg.add(format_args!("<desc>{}</desc>", escaped(description)));
        }
        svg.add(format_args!(r##"<rect width="{width}" height="{height}" fill="var(--sheet)"/>"##));
        // At the left, where a picture that does not fit is seen first.
        svg.text(title, (12.0, 26.0), 19, Anchor::Start);
        svg
    }

    pub(super) fn add(&mut self, element: Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{element}");
    }

    pub(super) fn text(&mut self, text: &str, at: (f64, f64), size: u32, anchor: Anchor) {
        self.coloured(text, at, size, anchor, "var(--ink)");
    }

    pub(super) fn coloured(&mut self, text: &str, (x, y): (f64, f64), size: u32, anchor: Anchor, colour: &str) {
        // As wide as there is place, by the mean width of letters.
        let room = match anchor {
            Anchor::Start => self.width - x,
            Anchor::Middle => 2.0 * x.min(self.width - x),
            Anchor::End => x,
        };
        // What may just fit stays whole: what is narrower than the mean is seen, and the rest is cut by the picture's edge.
        let text = escaped(&clipped(text, 1.15 * room, size));
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        // Not every program knows how to centre text vertically.
        let baseline = y + 0.35 * f64::from(size);
        self.add(format_args!(
            r##"<text x="{x:.1}" y="{baseline:.1}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{text}</text>"##
        ));
    }

    /// Text that is read from below.
    pub(super) fn upwards(&mut self, text: &str, (x, y): (f64, f64)) {
        let text = escaped(text);
        self.add(format_args!(
            r##"<text transform="translate({x:.1} {y:.1}) rotate(-90)" font-size="15" text-anchor="middle" fill="var(--ink)">{text}</text>"##
        ));
    }

    /// A line of the grid.
    pub(super) fn rule(&mut self, (x, y): (f64, f64), (to_x, to_y): (f64, f64)) {
        self.add(format_args!(r##"<path d="M{x:.1} {y:.1}L{to_x:.1} {to_y:.1}" stroke="var(--grid)"/>"##));
    }

    /// The axes.
    pub(super) fn frame(&mut self, plot: &Plot) {
        let Plot { x, y } = plot;
        self.add(format_args!(
            r##"<path d="M{:.1} {:.1}V{:.1}H{:.1}" stroke="var(--soft)" fill="none"/>"##,
            x.from, y.to, y.from, x.to
        ));
    }

    pub(super) fn line(&mut self, points: &[(f64, f64)], number: usize, dashed: bool, width: f64) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let (points, colour) = (points.join(" "), colour(number));
        let dashes = if dashed { r##" stroke-dasharray="7 4""## } else { "" };
        self.add(format_args!(
            r##"<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dashes}/>"##
        ));
    }

    /// A mark, whose shape says as much as its colour.
    pub(super) fn mark(&mut self, (x, y): (f64, f64), r: f64, number: usize, shape: usize) {
        let fill = colour(number);
        let at = |dx: f64, dy: f64| format!("{:.1} {:.1}", x + dx * r, y + dy * r);
        let polygon = |corners: &[(f64, f64)]| {
            let corners: Vec<String> = corners.iter().map(|(dx, dy)| at(*dx, *dy)).collect();
            format!("M{}Z", corners.join("L"))
        };
        let path = match shape % 6 {
            0 => {
                self.add(format_args!(r##"<circle cx="{x:.1}" cy="{y:.1}" r="{r}" fill="{fill}"/>"##));
                return;
            }
            1 => polygon(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
            2 => polygon(&[(0.0, -1.2), (1.15, 0.9), (-1.15, 0.9)]),
            3 => polygon(&[(0.0, -1.35), (1.35, 0.0), (0.0, 1.35), (-1.35, 0.0)]),
            4 => polygon(&[(0.0, 1.2), (1.15, -0.9), (-1.15, -0.9)]),
            _ => {
                let cross = format!("M{}L{}M{}L{}", at(-1.0, -1.0), at(1.0, 1.0), at(1.0, -1.0), at(-1.0, 1.0));
                self.add(format_args!(r##"<path d="{cross}" stroke="{fill}" stroke-width="2.5"/>"##));
                return;
            }
        };
        self.add(format_args!(r##"<path d="{path}" fill="{fill}"/>"##));
    }

    /// From the least to the most that a value may be.
    pub(super) fn whisker(&mut self, x: f64, (low, high): (f64, f64), number: usize) {
        let (stroke, left, right) = (colour(number), x - 4.0, x + 4.0);
        self.add(format_args!(
            r##"<path d="M{left:.1} {low:.1}H{right:.1}M{x:.1} {low:.1}V{high:.1}M{left:.1} {high:.1}H{right:.1}" stroke="{stroke}" stroke-width="1.2" fill="none"/>"##
        ));
    }

    pub(super) fn bar(&mut self, at: (f64, f64), size: (f64, f64), number: usize) {
        self.area(at, size, &colour(number), "");
    }

    /// A rectangle that says `tip` where a pointer rests on it.
    pub(super) fn area(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), fill: &str, tip: &str) {
        let tip = if tip.is_empty() { String::new() } else { format!("<title>{}</title>", escaped(tip)) };
        self.add(format_args!(
            r##"<rect x="{x:.1}" y="{y:.1}" width="{:.1}" height="{height:.1}" fill="{fill}">{tip}</rect>"##,
            width.max(0.0)
        ));
    }

    /// Slanted lines over a rectangle. A pattern would need a name of its own in a page with several pictures.
    pub(super) fn hatch(&mut self, (x, y): (f64, f64), (width, height): (f64, f64), stroke: &str) {
        let mut path = String::new();
        let mut along = 6.0;
        while along < width + height {
            let (from_x, from_y) = if along <= height { (0.0, along) } else { (along - height, height) };
            let (to_x, to_y) = if along <= width { (along, 0.0) } else { (width, along - width) };
            let _ = write!(path, "M{:.1} {:.1}L{:.1} {:.1}", x + from_x, y + from_y, x + to_x, y + to_y);
            along += 7.0;
        }
        if !path.is_empty() {
            self.add(format_args!(r##"<path d="{path}" stroke="{stroke}" stroke-width="1" pointer-events="none"/>"##));
        }
    }

    pub(super) fn finish(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }
}

/// Text without what means something in SVG and HTML, and without what XML does not allow at all.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(letter),
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            other => escaped.push(other),
        }
    }
    escaped
}

/// As much of a text as fits into a width, by the mean width of letters.
pub(super) fn clipped(text: &str, room: f64, size: u32) -> String {
    let letters = (room / (0.56 * f64::from(size))).max(1.0) as usize;
    if text.chars().count() <= letters {
        return text.to_string();
    }
    text.chars().take(letters.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_text_becomes_markup() {
        assert_eq!(escaped("<a href=\"x\" b='&'>\u{1}\n"), "&lt;a href=&quot;x&quot; b=&#39;&amp;&#39;&gt;\u{fffd}\n");
        let mut svg = Svg::new((100.0, 50.0), "</svg><script>", "\"><script>");
        svg.area((0.0, 0.0), (-3.0, 5.0), "var(--hole)", "<script>");
        let svg = svg.finish();
        assert!(!svg.contains("<script") && !svg.contains("width=\"-"), "{svg}");
    }

    #[test]
    fn long_texts_are_cut_and_say_so() {
        assert_eq!(clipped("short", 200.0, 12), "short");
        let cut = clipped(&"x".repeat(500), 120.0, 12);
        assert!(cut.chars().count() <= 20 && cut.ends_with('…'), "{cut}");
    }

    #[test]
    fn hatches_stay_inside_their_rectangle() {
        let mut svg = Svg::new((200.0, 100.0), "", "");
        svg.hatch((10.0, 20.0), (60.0, 30.0), "var(--soft)");
        let svg = svg.finish();
        let path = svg.lines().find(|line| line.contains("pointer-events")).unwrap();
        let path = path.split('"').nth(1).unwrap();
        for point in path.split(['M', 'L']).filter(|point| !point.is_empty()) {
            let (x, y) = point.split_once(' ').unwrap();
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((9.9..=70.1).contains(&x) && (19.9..=50.1).contains(&y), "{point}");
        }
    }
}
