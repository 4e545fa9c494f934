//! The results of a command: lines for people, or one JSON object per line for programs.

use std::fmt::Display;

use anyhow::Result;
use serde_json::Value;

use crate::output::{self, line};

/// Where the results go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transcript {
    json: bool,
    /// Standard output carries something else: a descriptor, or the bytes of a tensor.
    to_stderr: bool,
}

/// A result in both forms.
#[derive(Debug)]
pub(crate) struct Entry {
    event: &'static str,
    /// An object.
    fields: Value,
    text: String,
}

impl Entry {
    /// Creates an entry from the name of the event, its fields as a JSON object, and the line for people.
    pub(crate) fn new(event: &'static str, fields: Value, text: impl Display) -> Self {
        Self { event, fields, text: text.to_string() }
    }
}

impl Transcript {
    pub(crate) const fn new(json: bool, to_stderr: bool) -> Self {
        Self { json, to_stderr }
    }

    /// Prints an entry.
    pub(crate) fn print(self, entry: Entry) -> Result<()> {
        let text = if self.json { as_json(entry)? } else { entry.text };
        if self.to_stderr {
            output::error_line(text);
            return Ok(());
        }
        line(text)
    }

    /// Prints an entry that [`Entry::new`] makes of these.
    pub(crate) fn event(self, event: &'static str, fields: Value, text: impl Display) -> Result<()> {
        self.print(Entry::new(event, fields, text))
    }
}

fn as_json(entry: Entry) -> Result<String> {
    let mut object = serde_json::Map::new();
    object.insert("event".into(), entry.event.into());
    if let Value::Object(fields) = entry.fields {
        object.extend(fields);
    }
    Ok(output::escaped(&serde_json::to_string(&object)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_entry_names_its_event_and_fields() {
        let entry = Entry::new("opened", json!({ "pid": 7, "text": "a\u{9b}b" }), "text");
        assert_eq!(as_json(entry).unwrap(), r#"{"event":"opened","pid":7,"text":"a\u009bb"}"#);
    }
}
