//! The page as it grows: sections, tables, figures. What comes from data is escaped here and nowhere else.

use std::fmt::Write;

use rig::plot::{css, escaped};

/// Everything of a page but its frame.
#[derive(Default)]
pub(crate) struct Page {
    body: String,
    /// Anchor and name of each section.
    contents: Vec<(String, String)>,
    /// Whether a topic is open, which ends where the next begins.
    in_topic: bool,
    /// Pictures to be written beside the page: name of the file, SVG.
    pub(crate) figures: Vec<(String, String)>,
}

/// Lines of figures under a header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) head: Vec<String>,
    /// How many columns are names, to the left; the others are figures, to the right.
    pub(crate) names: usize,
    pub(crate) rows: Vec<Vec<String>>,
}

/// What a statement is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The data supports it.
    Found,
    /// The data does not tell one from the other.
    Open,
    /// It is to be read with care.
    Doubt,
}

impl Table {
    pub(crate) fn new(head: &[&str], names: usize) -> Self {
        Table { head: head.iter().map(ToString::to_string).collect(), names, rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl Page {
    /// Begins a section; `name` is for the table of contents.
    pub(crate) fn section(&mut self, id: &str, name: &str, title: &str) {
        self.end_topic();
        self.contents.push((id.to_string(), name.to_string()));
        let _ = writeln!(self.body, "<h2 id=\"{}\">{}</h2>", escaped(id), escaped(title));
    }

    /// Begins a folded part of a section, which ends where the next topic or section begins.
    pub(crate) fn topic(&mut self, id: &str, title: &str) {
        self.end_topic();
        self.in_topic = true;
        let (id, title) = (escaped(id), escaped(title));
        let _ = writeln!(self.body, "<details class=\"topic\" id=\"{id}\"><summary>{title}</summary>");
    }

    fn end_topic(&mut self) {
        if std::mem::take(&mut self.in_topic) {
            self.body.push_str("</details>\n");
        }
    }

    pub(crate) fn heading(&mut self, title: &str) {
        let _ = writeln!(self.body, "<h3>{}</h3>", escaped(title));
    }

    pub(crate) fn text(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escaped(text));
    }

    /// Begins the top of the page with sentences; what follows until [`Page::end_first`] stands beside them, where there is place.
    pub(crate) fn first(&mut self, sentences: &[String]) {
        self.body.push_str("<div class=\"first\"><div>\n");
        sentences.iter().for_each(|sentence| self.text(sentence));
        self.body.push_str("</div>\n");
    }

    pub(crate) fn end_first(&mut self) {
        self.body.push_str("</div>\n");
    }

    pub(crate) fn small(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p class=\"small\">{}</p>", escaped(text));
    }

    /// Something that a reader must not miss.
    pub(crate) fn warning(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p class=\"warning\"><b>Careful:</b> {}</p>", escaped(text));
    }

    pub(crate) fn code(&mut self, text: &str) {
        let _ = writeln!(self.body, "<pre>{}</pre>", escaped(text));
    }

    /// Statements, each with a sign of what it is.
    pub(crate) fn statements(&mut self, statements: &[(Mark, String)]) {
        self.body.push_str("<ul class=\"said\">\n");
        for (mark, text) in statements {
            let (class, sign, word) = match mark {
                Mark::Found => ("found", "●", "found"),
                Mark::Open => ("open", "○", "not decided"),
                Mark::Doubt => ("doubt", "▲", "with care"),
            };
            let text = escaped(text);
            let _ = writeln!(
                self.body,
                "<li class=\"{class}\"><span class=\"sign\" role=\"img\" aria-label=\"{word}\">{sign}</span>{text}</li>"
            );
        }
        self.body.push_str("</ul>\n");
    }

    /// Links to files beside the page: path from the page, and name.
    pub(crate) fn links(&mut self, links: &[(String, String)]) {
        self.body.push_str("<ul>\n");
        for (path, name) in links {
            let _ = writeln!(self.body, "<li><a href=\"{}\">{}</a></li>", address(path), escaped(name));
        }
        self.body.push_str("</ul>\n");
    }

    pub(crate) fn table(&mut self, table: &Table) {
        // On a telephone nobody would look for columns that cannot be seen.
        let many = if table.head.len() > 3 { " many" } else { "" };
        let _ = write!(self.body, "<div class=\"wide{many}\" tabindex=\"0\"><table><thead><tr>");
        let class = |index: usize| if index < table.names { " class=\"name\"" } else { "" };
        for (index, cell) in table.head.iter().enumerate() {
            let _ = write!(self.body, "<th scope=\"col\"{}>{}</th>", class(index), escaped(cell));
        }
        self.body.push_str("</tr></thead><tbody>\n");
        for row in &table.rows {
            self.body.push_str("<tr>");
            for (index, cell) in row.iter().enumerate() {
                let _ = write!(self.body, "<td{}>{}</td>", class(index), escaped(cell));
            }
            self.body.push_str("</tr>\n");
        }
        self.body.push_str("</tbody></table></div>\n");
    }

    /// A table that opens on demand.
    pub(crate) fn folded_table(&mut self, title: &str, table: &Table) {
        self.folded(title, |page| page.table(table));
    }

    pub(crate) fn folded(&mut self, title: &str, inside: impl FnOnce(&mut Page)) {
        let _ = writeln!(self.body, "<details><summary>{}</summary>", escaped(title));
        inside(self);
        self.body.push_str("</details>\n");
    }

    /// A picture in the page and in a file of its own; where there is nothing to draw, that is said.
    pub(crate) fn figure(&mut self, name: &str, picture: Result<String, String>, caption: &str) {
        match picture {
            Ok(svg) => {
                let file = format!("{:02}-{}.svg", self.figures.len() + 1, slug(name));
                let width = width(&svg);
                let _ = writeln!(
                    self.body,
                    "<figure><div class=\"wide\" tabindex=\"0\" style=\"--w:{width}\">{svg}</div><figcaption>{} \
                     <a href=\"figures/{file}\">SVG</a></figcaption></figure>",
                    escaped(caption)
                );
                self.figures.push((file, svg));
            }
            Err(why) => self.small(&format!("No picture: {why}.")),
        }
    }

    /// The whole document.
    pub(crate) fn finish(mut self, title: &str) -> String {
        self.end_topic();
        let title = escaped(title);
        let style = css() + include_str!("style.css");
        let contents: String = self
            .contents
            .iter()
            .map(|(id, name)| format!("<li><a href=\"#{}\">{}</a></li>", escaped(id), escaped(name)))
            .collect();
        let body = &self.body;
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\">\
             <title>{title}</title><link rel=\"icon\" href=\"data:,\"><style>{style}</style></head>\n\
             <body><nav aria-label=\"Contents\"><ol>{contents}</ol></nav>\n<main><h1>{title}</h1>\n{body}</main></body></html>\n"
        )
    }
}

/// The width that a picture gives itself.
fn width(svg: &str) -> u32 {
    let value = svg.split_once("width=\"").and_then(|(_, rest)| rest.split_once('"')).map(|(value, _)| value);
    value.and_then(|value| value.parse::<f64>().ok()).map_or(960, |width| width as u32)
}

/// A name that every file system takes, and that says what it was.
fn slug(name: &str) -> String {
    let letters =
        name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' });
    let mut slug = String::new();
    for letter in letters {
        if slug.len() < 60 && !(letter == '-' && (slug.is_empty() || slug.ends_with('-'))) {
            slug.push(letter);
        }
    }
    slug.trim_end_matches('-').to_string()
}

/// A path as an address relative to the page.
fn address(path: &str) -> String {
    let mut address = String::new();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' | b'~' => {
                address.push(char::from(byte))
            }
            other => {
                let _ = write!(address, "%{other:02X}");
            }
        }
    }
    // What looks like `scheme:` must not be taken for one; `:` is written as %3A above.
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_never_becomes_markup() {
        let evil = "\"><script>alert(1)</script><img src=x onerror='x'>";
        let mut page = Page::default();
        page.section("one", evil, evil);
        page.topic("two", evil);
        page.heading(evil);
        page.text(evil);
        page.warning(evil);
        page.code(evil);
        page.statements(&[(Mark::Found, evil.into())]);
        page.links(&[("javascript:alert(1)".into(), evil.into()), (evil.into(), evil.into())]);
        page.table(&Table { head: vec![evil.into()], names: 1, rows: vec![vec![evil.into()]] });
        page.figure(evil, Err(evil.into()), evil);
        page.figure(evil, Ok("<svg width=\"10\"/>".into()), evil);
        assert_eq!(page.figures[0].0, "01-script-alert-1-script-img-src-x-onerror-x.svg");
        let html = page.finish(evil);
        assert!(!html.contains("<script") && !html.contains("<img") && !html.contains("javascript:"), "{html}");
    }

    #[test]
    fn file_names_are_short_and_plain() {
        assert_eq!(slug("Step time: WAN, 4 ranks"), "step-time-wan-4-ranks");
        assert!(slug(&"é".repeat(300)).is_empty());
        assert!(slug(&"x".repeat(300)).len() <= 60);
        assert_eq!(address("traces/a b:c.json"), "traces/a%20b%3Ac.json");
        assert_eq!(width("<svg xmlns=\"x\" width=\"560\" height=\"3\">"), 560);
    }
}
