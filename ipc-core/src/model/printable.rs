//! Text of other processes, made fit for terminals and logs.

/// Returns the text with every character replaced by U+FFFD that a terminal would act upon (control characters, the start of
/// escape sequences) or that changes how the text around it is shown (bidirectional controls, invisible characters).
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_harmful(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests;
