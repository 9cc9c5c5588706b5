//! Elements of drawings.

use crate::escape;

/// Returns a drawing as wide as the page. On a narrow page it scrolls, so that its text stays
/// readable.
pub(super) fn drawing((width, height): (f64, f64), name: &str, content: &str) -> String {
    format!(
        "<div class=\"wide\"><svg viewBox=\"0 0 {width:.0} {height:.0}\" style=\"min-width:{:.0}px;max-width:{width:.0}px\" role=\"img\" aria-label=\"{}\">\n{content}</svg></div>",
        width * 0.85,
        escape::text(name),
    )
}

/// Returns a rectangle with a position, a size, a class, and a text that is shown when the pointer
/// is over it.
pub(super) fn bar([x, y, width, height]: [f64; 4], class: &str, title: &str) -> String {
    format!(
        "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" class=\"{class}\"><title>{}</title></rect>\n",
        escape::text(title),
    )
}

/// Returns a text. `anchor` aligns it at its place: `start`, `middle` or `end`.
pub(super) fn text((x, y): (f64, f64), anchor: &str, words: &str) -> String {
    format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n",
        escape::text(words)
    )
}
