//! Reads the public items of a crate from the pages that rustdoc has written.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Returns one line for each public item, member and implementation below a crate's directory of pages. An item that the crate
/// re-exports from another crate is one line; its contents are listed with the other crate.
pub(super) fn public_items(crate_pages: &Path) -> Result<BTreeSet<String>> {
    let own = crate_pages.file_name().and_then(|name| name.to_str()).context("the crate has no name")?;
    let mut items = BTreeSet::new();
    let mut foreign_modules = Vec::new();
    modules(crate_pages, own, "", &mut items, &mut foreign_modules)?;
    let index = read(&crate_pages.join("all.html"))?;
    let links = item_links(&index);
    if links.is_empty() {
        bail!("{own} has no items: this rustdoc writes pages of another structure");
    }
    for (href, path) in links {
        if foreign_modules.iter().any(|module| path.starts_with(&format!("{module}::"))) {
            continue;
        }
        let kind = href.rsplit('/').next().unwrap_or(href).split('.').next().unwrap_or_default();
        let page = read(&crate_pages.join(href))?;
        match source(&page) {
            Some(source) if source == own => {
                let lines = item(kind, &path, &page);
                if lines.is_empty() {
                    bail!(
                        "the page of {path} declares nothing: this rustdoc writes pages of another structure"
                    );
                }
                items.extend(lines);
            }
            source => drop(items.insert(format!("{path}: {kind} of {}", source.unwrap_or("another crate")))),
        }
    }
    Ok(items)
}

/// Returns the crate whose source the page of an item or a module links.
fn source(page: &str) -> Option<&str> {
    let (_, heading) = page.split_once("class=\"sub-heading\"")?;
    let href = attribute(heading.split_once("class=\"src\"")?.1, "href")?;
    href.rsplit_once("/src/")?.1.split('/').next()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Collects the modules below `folder`, the re-exports that have no page, and the paths of modules of other crates.
fn modules(
    folder: &Path,
    own: &str,
    path: &str,
    items: &mut BTreeSet<String>,
    foreign: &mut Vec<String>,
) -> Result<()> {
    let page = read(&folder.join("index.html"))?;
    let prefix = if path.is_empty() { String::new() } else { format!("{path}::") };
    for row in page.split("<dt").skip(1) {
        let row = row.split("</dt>").next().unwrap_or_default();
        let text = plain_text(row.split_once('>').map_or("", |(_, row)| row));
        if text.starts_with("pub use ") {
            items.insert(format!("{prefix}{}: {text}", re_exported(&text)));
        } else if row.contains("<a class=\"mod\"") {
            // A row may show more than the name, such as a feature.
            let name = text.split_whitespace().next().unwrap_or_default();
            let (folder, path) = (folder.join(name), format!("{prefix}{name}"));
            let page = read(&folder.join("index.html"))?;
            match source(&page) {
                Some(source) if source == own => {
                    items.insert(format!("{path}: pub mod {name}"));
                    modules(&folder, own, &path, items, foreign)?;
                }
                source => {
                    items.insert(format!("{path}: mod of {}", source.unwrap_or("another crate")));
                    foreign.push(path);
                }
            }
        }
    }
    Ok(())
}

/// Returns the name by which users know a re-export.
fn re_exported(text: &str) -> &str {
    text.trim_end_matches(';').rsplit([' ', ':']).next().unwrap_or(text)
}

/// Returns the links of the page of all items, and the paths that they show.
fn item_links(page: &str) -> Vec<(&str, String)> {
    let links = page.split("<li><a href=\"").skip(1).filter_map(|rest| {
        let (href, rest) = rest.split_once('"')?;
        let text = rest.split_once('>')?.1.split("</a>").next()?;
        Some((href, plain_text(text)))
    });
    links.filter(|(href, _)| href.ends_with(".html") && !href.starts_with('#')).collect()
}

/// Returns the lines of one item.
fn item(kind: &str, path: &str, page: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut implementation = String::new();
    let mut declared = false;
    for Code { section, tag, text } in codes(page) {
        match (section.as_str(), tag) {
            // A second declaration is that of an alias's type.
            (_, "pre") if !declared => {
                declared = true;
                lines.extend(declaration(kind, path, &text));
            }
            ("implementations", "h3") => implementation = one_line(&text),
            ("implementations", "h4") => {
                let text = one_line(&text);
                let member = member_name(&text);
                let bounds = if implementation.contains('<') {
                    format!(" in {implementation}")
                } else {
                    String::new()
                };
                lines.push(format!("{path}::{member}: {text}{bounds}"));
            }
            ("trait-implementations" | "foreign-impls", "h3") => {
                implementation = one_line(&text);
                if !implementation.contains("StructuralPartialEq") {
                    lines.push(format!("{path}: {implementation}"));
                }
            }
            ("trait-implementations" | "foreign-impls", "h4") if text.starts_with("type ") => {
                lines.push(format!("{path}: {implementation} {{ {} }}", one_line(&text)));
            }
            ("synthetic-implementations", "h3") => {
                let text = one_line(&text);
                // The other automatic traits change with the standard library.
                if ["Send for", "Sync for"].iter().any(|name| text.contains(name)) {
                    lines.push(format!("{path}: {text}"));
                }
            }
            _ => {}
        }
    }
    lines
}

/// Returns the lines of an item's declaration: the head, and each field, variant or trait member.
fn declaration(kind: &str, path: &str, text: &str) -> Vec<String> {
    let has_members = ["struct", "enum", "union", "trait"].contains(&kind);
    let head = text.lines().position(|line| line.ends_with('{'));
    let (Some(head), true) = (head, has_members) else { return vec![format!("{path}: {}", one_line(text))] };
    let all: Vec<&str> = text.lines().collect();
    let mut lines = vec![format!("{path}: {} }}", one_line(&all[..=head].join("\n")))];
    let mut members: Vec<String> = Vec::new();
    for line in &all[head + 1..] {
        let indent = line.len() - line.trim_start().len();
        let begins = indent == 4 && !line.trim_start().starts_with(['}', ')']);
        match members.last_mut() {
            _ if line.trim().is_empty() || line.starts_with('}') || line.trim_start().starts_with("//") => {}
            Some(last) if !begins => *last = format!("{last}\n{line}"),
            _ => members.push((*line).to_owned()),
        }
    }
    for member in members {
        let text = one_line(member.trim().trim_end_matches([',', ';']));
        match member_name(&text) {
            "" => lines.push(format!("{path}: {text}")),
            name => lines.push(format!("{path}::{name}: {text}")),
        }
    }
    lines
}

/// Returns the name of a field, a variant or an associated item; nothing for a comment.
fn member_name(declaration: &str) -> &str {
    let mut rest = declaration;
    // Attributes and keywords.
    while let Some(behind) = rest.strip_prefix("#[") {
        rest = behind.split_once(']').map_or("", |(_, behind)| behind.trim_start());
    }
    while let Some((word, behind)) = rest.split_once(' ') {
        if !["pub", "const", "async", "unsafe", "extern", "\"C\"", "fn", "type"].contains(&word) {
            break;
        }
        rest = behind;
    }
    let end = rest.find(|character: char| !character.is_alphanumeric() && character != '_');
    &rest[..end.unwrap_or(rest.len())]
}

/// Code that a page shows: a declaration (`pre`), the head of an implementation or a variant (`h3`), or a member (`h4`).
struct Code {
    /// The id of the heading above it.
    section: String,
    tag: &'static str,
    text: String,
}

fn codes(page: &str) -> Vec<Code> {
    const CODE: [(&str, &str); 3] = [("pre", "rust item-decl"), ("h3", "code-header"), ("h4", "code-header")];
    let page = page.split_once("id=\"main-content\"").map_or(page, |(_, main)| main);
    let mut codes = Vec::new();
    let mut section = String::new();
    let mut rest = page;
    while let Some((_, behind)) = rest.split_once('<') {
        let Some((tag, behind)) = behind.split_once('>') else { break };
        rest = behind;
        let name = tag.split(' ').next().unwrap_or_default();
        if name == "h2" && tag.contains("section-header") {
            section = attribute(tag, "id").unwrap_or_default().to_owned();
        }
        let code = CODE.iter().find(|(code, class)| *code == name && attribute(tag, "class") == Some(*class));
        if let Some((tag, _)) = code {
            let (text, behind) = behind.split_once(&format!("</{tag}>")).unwrap_or((behind, ""));
            codes.push(Code { section: section.clone(), tag, text: plain_text(text) });
            rest = behind;
        }
    }
    codes
}

fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, value) = tag.split_once(&format!(" {name}=\""))?;
    Some(value.split_once('"')?.0)
}

/// Returns the text of a piece of a page, without its tags and the captions of parts that the browser folds.
fn plain_text(html: &str) -> String {
    let mut text = String::new();
    let mut rest = html;
    while let Some((before, behind)) = rest.split_once('<') {
        text.push_str(before);
        let (tag, behind) = behind.split_once('>').unwrap_or((behind, ""));
        rest = behind;
        if tag.starts_with("summary") {
            rest = behind.split_once("</summary>").map_or("", |(_, behind)| behind);
            text.push('\n');
        } else if tag.starts_with("div") || tag == "/div" {
            text.push('\n');
        }
    }
    text.push_str(rest);
    for (entity, character) in [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&nbsp;", " "),
        ("ⓘ", ""),
        ("&amp;", "&"),
    ] {
        text = text.replace(entity, character);
    }
    text.trim().to_owned()
}

/// Returns code on one line, so that rustdoc's line breaks do not matter.
fn one_line(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace("( ", "(").replace(", )", ")").replace(" )", ")").trim_end_matches(',').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRUCT: &str = r##"<script>a<b</script><section id="main-content" class="content"><h1>Struct</h1>
<pre class="rust item-decl"><code><div class="code-attribute">#[non_exhaustive]</div>pub struct A&lt;'a, T&gt;<div class="where">where
    T: <a class="trait" href="x">Send</a>,</div>{
    pub x: &amp;'a <a href="y">[T]</a>,
    <span class="comment">/* private fields */</span>
}</code></pre><div class="docblock"><h2 id="no"><a href="#no">§</a>No</h2></div>
<h2 id="implementations" class="section-header">Implementations</h2><div><section><h3 class="code-header">impl&lt;T: <a>Clone</a>&gt; <a>A</a>&lt;'_, T&gt;</h3></section>
<section><h4 class="code-header">pub const fn <a href="#m" class="fn">m</a>&lt;F&gt;(
    &amp;self,
    f: F,
) -&gt; <a>u8</a><div class="where">where
    F: <a>Fn</a>(<a>u8</a>) -&gt; <a>u8</a>,</div></h4></section></div>
<h2 id="deref-methods-u8" class="section-header">Methods from Deref</h2><h4 class="code-header">pub fn <a>is_ascii</a>(&amp;self)</h4>
<h2 id="trait-implementations" class="section-header">Trait Implementations</h2><h3 class="code-header">impl <a>Deref</a> for <a>A</a>&lt;'_, T&gt;</h3>
<h4 class="code-header">type <a>Target</a> = <a>u8</a></h4><h4 class="code-header">fn <a>deref</a>(&amp;self) -&gt; &amp;<a>u8</a></h4>
<h2 id="synthetic-implementations" class="section-header">Auto Trait Implementations</h2><h3 class="code-header">impl !<a>Send</a> for <a>A</a></h3>
<h3 class="code-header">impl <a>Unpin</a> for <a>A</a></h3>
<h2 id="blanket-implementations" class="section-header">Blanket</h2><h3 class="code-header">impl&lt;T&gt; <a>Any</a> for T</h3>"##;

    #[test]
    fn struct_has_fields_methods_and_implementations() {
        assert_eq!(
            item("struct", "sub::A", STRUCT),
            [
                "sub::A: #[non_exhaustive] pub struct A<'a, T> where T: Send, { }",
                "sub::A::x: pub x: &'a [T]",
                "sub::A: /* private fields */",
                "sub::A::m: pub const fn m<F>(&self, f: F) -> u8 where F: Fn(u8) -> u8 in impl<T: Clone> A<'_, T>",
                "sub::A: impl Deref for A<'_, T>",
                "sub::A: impl Deref for A<'_, T> { type Target = u8 }",
                "sub::A: impl !Send for A",
            ]
        );
    }

    #[test]
    fn enum_has_one_line_per_variant() {
        let page = r##"id="main-content"><pre class="rust item-decl"><code>pub enum E {
<details><summary class="hideme"><span>Show 3 variants</span></summary>    V,
    W(<a>u8</a>, <a>String</a>),
    X {
        a: <a>u8</a>,
    },
</details>}</code></pre><h2 id="variants" class="section-header">V</h2><h3 class="code-header">V</h3>"##;
        let expected = ["E: pub enum E { }", "E::V: V", "E::W: W(u8, String)", "E::X: X { a: u8, }"];
        assert_eq!(item("enum", "E", page), expected);
    }

    #[test]
    fn trait_has_its_members_and_implementations_of_other_types() {
        let page = r##"id="main-content"><pre class="rust item-decl"><code>pub trait Tr:
    <a>Send</a>
    + <a>Sync</a> {
<details class="toggle"><summary class="hideme"><span>Show 3 methods</span></summary>    type <a>Ty</a>: <a>Clone</a>;

    // Required method
    fn <a>req</a>(&amp;self, a: <a>u8</a>)
       <div class="where">where Self: Sized;</div>

    // Provided method
    fn <a>prov</a>(&amp;self) -&gt; <a>Vec</a>&lt;<a>u8</a>&gt; <a href="#" class="tooltip">ⓘ</a> { ... }
</details>}</code></pre><h2 id="required-methods" class="section-header">R</h2><h4 class="code-header">fn <a>req</a>(&amp;self)</h4>
<h2 id="foreign-impls" class="section-header">F</h2><h3 class="code-header">impl <a>Tr</a> for <a>u8</a></h3>"##;
        let expected = [
            "Tr: pub trait Tr: Send + Sync { }",
            "Tr::Ty: type Ty: Clone",
            "Tr::req: fn req(&self, a: u8) where Self: Sized",
            "Tr::prov: fn prov(&self) -> Vec<u8> { ... }",
            "Tr: impl Tr for u8",
        ];
        assert_eq!(item("trait", "Tr", page), expected);
    }

    #[test]
    fn modules_and_re_exports_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let pages = folder.path().join("own");
        let page = |file: &str, text: &str| {
            let file = pages.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let heading = |source: &str| {
            format!(
                r#"id="main-content"><span class="sub-heading"><a class="src" href="{source}">Source</a></span>"#
            )
        };
        let code = r#"<pre class="rust item-decl"><code>pub fn f(x: <a>u8</a>)</code></pre>"#;
        let root = r##"<dl><dt id="reexport.x"><code>pub use <a class="mod">other</a>::*;</code></dt>
<dt><code>pub use <a class="mod">device_ipc_cuda</a> as cuda;</code></dt></dl>
<dl><dt><a class="mod" href="sub/index.html">sub</a></dt><dd>text</dd><dt><a class="mod" href="half/index.html">half</a></dt></dl>"##;
        let all = r#"<ul><li><a href="sub/fn.f.html">sub::f</a></li><li><a href="fn.g.html">g</a></li>
<li><a href="half/fn.h.html">half::h</a></li></ul>"#;
        page("index.html", root);
        page("all.html", all);
        page("sub/index.html", &heading("../../src/own/lib.rs.html#1"));
        page("half/index.html", &heading("https://docs.rs/half/2.7.1/src/half/lib.rs.html#1-283"));
        page("sub/fn.f.html", &format!("{}{code}", heading("../../src/own/sub.rs.html#3")));
        page("fn.g.html", &format!("{}{code}", heading("../src/core/g.rs.html#3")));
        let items: Vec<_> = public_items(&pages).unwrap().into_iter().collect();
        let expected = [
            "*: pub use other::*;",
            "cuda: pub use device_ipc_cuda as cuda;",
            "g: fn of core",
            "half: mod of half",
            "sub: pub mod sub",
            "sub::f: pub fn f(x: u8)",
        ];
        assert_eq!(items, expected);
    }

    #[test]
    fn member_has_its_name() {
        for (declaration, name) in [
            ("pub const fn new(x: u8) -> Self", "new"),
            ("pub unsafe fn share<T>(self)", "share"),
            ("#[must_use] pub fn f()", "f"),
            ("const K: usize", "K"),
            ("type Ty: Clone", "Ty"),
            ("pub field: u8", "field"),
            ("Variant(u8)", "Variant"),
            ("Unit", "Unit"),
            ("/* private fields */", ""),
        ] {
            assert_eq!(member_name(declaration), name, "{declaration}");
        }
    }
}
