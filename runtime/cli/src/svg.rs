//! Elements of SVG drawings, with the names in them escaped.

/// Maximum number of characters in a name. Longer names would overlap the bars.
const MOST_CHARACTERS: usize = 30;

/// Escapes the characters that have a meaning in XML.
pub(crate) fn escaped(text: &str) -> String {
    let mut xml = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => xml.push_str("&amp;"),
            '<' => xml.push_str("&lt;"),
            '>' => xml.push_str("&gt;"),
            '"' => xml.push_str("&quot;"),
            // XML allows these in no form.
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => {
                xml.push('\u{fffd}');
            }
            other => xml.push(other),
        }
    }
    xml
}

/// Shortens a long name to its end, where names differ.
pub(crate) fn shortened(name: &str) -> String {
    let characters = name.chars().count();
    match characters > MOST_CHARACTERS {
        true => {
            format!("…{}", name.chars().skip(characters + 1 - MOST_CHARACTERS).collect::<String>())
        }
        false => name.to_owned(),
    }
}

/// Returns a drawing as wide as the page. On a narrow page it scrolls, so that its text stays
/// readable.
pub(super) fn drawing(width: f64, height: f64, name: &str, content: &str) -> String {
    format!(
        "<div class=\"wide\"><svg viewBox=\"0 0 {width:.0} {height:.0}\" style=\"min-width:{:.0}px;max-width:{width:.0}px\" role=\"img\" aria-label=\"{}\">\n{content}</svg></div>",
        width * 0.85,
        escaped(name),
    )
}

/// Returns a rectangle with a position, a size, a class, and a text that is shown when the pointer
/// is over it.
pub(super) fn bar([x, y, width, height]: [f64; 4], class: &str, title: &str) -> String {
    format!(
        "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" class=\"{class}\"><title>{}</title></rect>\n",
        escaped(title),
    )
}

/// Returns a text. `anchor` aligns it at its place: `start`, `middle` or `end`.
pub(super) fn text(x: f64, y: f64, anchor: &str, words: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n", escaped(words))
}
