//! Colours, by name. A page gives the names their values, for light and for dark; a file on its own has the light ones written in.
//!
//! Those of lines and bars are of Okabe and Ito (2008), which people with any of the common kinds of colour blindness can tell apart; yellow,
//! which is hard to see on white, is left out; brown is added for a ninth. Those of heat maps are one hue that only gets darker (lighter, on dark), so that they can be
//! told apart without seeing colour at all.

use std::fmt::Write;

/// How many colours lines and bars have.
pub const COLOURS: usize = 9;

/// How many shades a heat map has.
pub(crate) const SHADES: usize = 7;

/// Name, its colour on light and on dark.
const NAMES: [(&str, &str, &str); 29] = [
    ("ink", "#1b1f24", "#e6e8eb"),
    ("soft", "#59616b", "#a3abb5"),
    ("grid", "#dddddd", "#3a4149"),
    ("sheet", "#ffffff", "#14181d"),
    ("hole", "#f0f0f0", "#22272e"),
    ("warn", "#b02a00", "#ff9d7a"),
    ("c0", "#000000", "#f2f2f2"),
    ("c1", "#e69f00", "#e69f00"),
    ("c2", "#56b4e9", "#8bd0f7"),
    ("c3", "#009e73", "#1fc198"),
    ("c4", "#0072b2", "#3d8fd6"),
    ("c5", "#d55e00", "#f07a24"),
    ("c6", "#cc79a7", "#dd92bb"),
    ("c7", "#8c8c8c", "#8f98a3"),
    ("c8", "#7a4a1c", "#c89b6c"),
    ("s0", "#eef4fa", "#16202b"),
    ("s1", "#d6e6f4", "#1a344e"),
    ("s2", "#b3d1ea", "#1f4a73"),
    ("s3", "#84b4da", "#2b669e"),
    ("s4", "#4a8fc4", "#6aa9dc"),
    ("s5", "#1d66a3", "#a3cdee"),
    ("s6", "#0b3d70", "#dcecf9"),
    ("t0", "#1b1f24", "#e6e8eb"),
    ("t1", "#1b1f24", "#e6e8eb"),
    ("t2", "#1b1f24", "#ffffff"),
    ("t3", "#11151a", "#ffffff"),
    ("t4", "#000000", "#0b1017"),
    ("t5", "#ffffff", "#0b1017"),
    ("t6", "#ffffff", "#0b1017"),
];

/// A colour of lines and bars, counted around.
pub(super) fn colour(number: usize) -> String {
    format!("var(--c{})", number % COLOURS)
}

/// The colour of a shade of a heat map, and of the text on it.
pub(super) fn shade(number: usize) -> (String, String) {
    let number = number.min(SHADES - 1);
    (format!("var(--s{number})"), format!("var(--t{number})"))
}

/// What a page needs for its pictures to have colours.
pub fn css() -> String {
    let values = |pick: fn(&(&str, &str, &str)) -> String| NAMES.iter().map(pick).collect::<String>();
    let mut css = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(css, ":root{{{}}}", values(|(name, light, _)| format!("--{name}:{light};")));
    let dark = values(|(name, _, dark)| format!("--{name}:{dark};"));
    let _ = writeln!(css, "@media (prefers-color-scheme:dark){{:root{{{dark}}}}}");
    css
}

/// The picture with colours instead of their names, for programs other than browsers.
pub(super) fn light(svg: &str) -> String {
    NAMES.iter().fold(svg.to_string(), |svg, (name, light, _)| svg.replace(&format!("var(--{name})"), light))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Relative luminance and contrast by the web's accessibility guidelines.
    fn contrast(one: &str, other: &str) -> f64 {
        let luminance = |colour: &str| {
            let channel = |at: usize| {
                let value = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
                if value <= 0.03928 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
        };
        let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
        (one / other).max(other / one)
    }

    fn value(name: &str) -> (&'static str, &'static str) {
        NAMES.iter().find(|entry| entry.0 == name).map(|entry| (entry.1, entry.2)).unwrap()
    }

    #[test]
    fn text_can_be_read_on_every_shade_in_light_and_dark() {
        let pairs = (0..SHADES).map(|shade| (format!("t{shade}"), format!("s{shade}")));
        let text = ["ink", "soft", "warn"].into_iter().map(|name| (name.to_string(), "sheet".to_string()));
        for (text, ground) in pairs.chain(text).chain([("ink".into(), "hole".into())]) {
            let ((light, dark), (light_ground, dark_ground)) = (value(&text), value(&ground));
            assert!(contrast(light, light_ground) >= 4.5, "{text} on {ground}: {}", contrast(light, light_ground));
            assert!(contrast(dark, dark_ground) >= 4.5, "dark {text} on {ground}: {}", contrast(dark, dark_ground));
        }
    }

    #[test]
    fn a_file_has_no_names_left() {
        let names: Vec<String> = (0..COLOURS).map(colour).collect();
        let (ground, text) = shade(99);
        let svg = format!("{} {ground} {text} var(--ink) var(--hole)", names.join(" "));
        assert!(!light(&svg).contains("var("), "{}", light(&svg));
        assert!(css().contains("--c4:#0072b2;") && css().contains("prefers-color-scheme:dark"));
    }
}
