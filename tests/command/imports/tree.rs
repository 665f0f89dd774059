//! The modules of a crate, and the items that their paths name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit;

use super::Read;
use super::uses::{Imported, attributes, for_tests, imported};

enum Name {
    Module(usize),
    Item,
    Import(Vec<String>),
    /// A `#[macro_export]` macro, which is visible at the crate's root wherever it is defined.
    Macro(usize),
    /// A word in a call of a macro that defines items.
    Word,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    Module(usize),
    /// An item of a module, or of a type in it.
    Item(usize),
    /// An item of another crate.
    Outside,
}

pub(super) struct Module {
    pub(super) file: PathBuf,
    /// Where the files of its children are.
    folder: PathBuf,
    parent: Option<usize>,
    names: BTreeMap<String, Vec<Name>>,
    globs: Vec<Vec<String>>,
    pub(super) items: Vec<syn::Item>,
}

/// The modules of a crate. The first is its root.
pub(super) struct Crate {
    pub(super) modules: Vec<Module>,
}

impl Crate {
    pub(super) fn read(root: &Path, read: Read<'_>) -> Self {
        let mut tree = Self { modules: Vec::new() };
        let folder = root.parent().expect("a file in a folder");
        tree.add_file(root, folder.to_owned(), None, read);
        for module in 0..tree.modules.len() {
            for name in tree.modules[module].exported_macros() {
                tree.modules[0].names.entry(name).or_default().push(Name::Macro(module));
            }
        }
        tree
    }

    fn add_file(&mut self, file: &Path, folder: PathBuf, parent: Option<usize>, read: Read<'_>) -> usize {
        let text = read(file).unwrap_or_else(|| panic!("no file {}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.add(file, folder, parent, parsed.items, read)
    }

    fn add(
        &mut self,
        file: &Path,
        folder: PathBuf,
        parent: Option<usize>,
        items: Vec<syn::Item>,
        read: Read<'_>,
    ) -> usize {
        let here = self.modules.len();
        let items: Vec<_> = items.into_iter().filter(|item| !for_tests(attributes(item))).collect();
        let (file, names, globs) = (file.to_owned(), BTreeMap::new(), Vec::new());
        self.modules.push(Module { file, folder, parent, names, globs, items: Vec::new() });
        let (modules, items): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| matches!(item, syn::Item::Mod(_)));
        for item in modules {
            let syn::Item::Mod(item) = item else { unreachable!("partitioned") };
            let name = item.ident.to_string();
            let child = self.add_child(here, item, read);
            self.modules[here].names.entry(name).or_default().push(Name::Module(child));
        }
        let mut defined = Definitions { module: &mut self.modules[here] };
        items.iter().for_each(|item| defined.add(item));
        self.modules[here].items = items;
        here
    }

    fn add_child(&mut self, parent: usize, item: syn::ItemMod, read: Read<'_>) -> usize {
        let name = item.ident.to_string();
        let Module { file, folder, .. } = &self.modules[parent];
        let (file, folder) = (file.clone(), folder.join(&name));
        if let Some((_, items)) = item.content {
            return self.add(&file, folder, Some(parent), items, read);
        }
        let beside = folder.with_extension("rs");
        let within = folder.join("mod.rs");
        let file = if read(&beside).is_some() { beside } else { within };
        self.add_file(&file, folder, Some(parent), read)
    }

    /// The items and modules to which a path in the module `here` may refer. `tried` stops cyclic re-exports.
    pub(super) fn resolve(
        &self,
        here: usize,
        path: &[String],
        tried: &mut BTreeSet<(usize, Vec<String>)>,
    ) -> BTreeSet<Target> {
        if !tried.insert((here, path.to_vec())) {
            return BTreeSet::new();
        }
        let mut targets = BTreeSet::new();
        for (at, name) in path.iter().enumerate() {
            let mut scopes = if at == 0 { BTreeSet::from([Target::Module(here)]) } else { targets };
            // A function or a macro may share a module's name; only the module contains names.
            if scopes.iter().any(|scope| matches!(scope, Target::Module(_))) {
                scopes.retain(|scope| matches!(scope, Target::Module(_)));
            }
            targets = scopes.into_iter().flat_map(|scope| self.step(scope, name, at == 0, tried)).collect();
        }
        targets
    }

    fn step(
        &self,
        scope: Target,
        name: &str,
        first: bool,
        tried: &mut BTreeSet<(usize, Vec<String>)>,
    ) -> BTreeSet<Target> {
        let Target::Module(module) = scope else { return BTreeSet::from([scope]) };
        match name {
            "crate" if first => BTreeSet::from([Target::Module(0)]),
            "self" => BTreeSet::from([scope]),
            "super" => self.modules[module].parent.map(Target::Module).into_iter().collect(),
            _ => self.named(module, name, tried),
        }
    }

    /// Whether a path in `module` begins with the name of another crate.
    fn is_outside(&self, module: usize, path: &[String]) -> bool {
        let first = path[0].as_str();
        let Module { names, globs, .. } = &self.modules[module];
        !["crate", "self", "super"].contains(&first)
            && globs.is_empty()
            && names
                .get(first)
                .is_none_or(|names| !names.iter().any(|name| !matches!(name, Name::Import(own) if own == path)))
    }

    fn named(&self, module: usize, name: &str, tried: &mut BTreeSet<(usize, Vec<String>)>) -> BTreeSet<Target> {
        let Module { names, globs, .. } = &self.modules[module];
        let known = names.get(name).map_or(&[][..], Vec::as_slice);
        let mut found = BTreeSet::new();
        for name in known {
            match name {
                Name::Module(child) => found.extend([Target::Module(*child)]),
                Name::Macro(module) => found.extend([Target::Item(*module)]),
                Name::Item => found.extend([Target::Item(module)]),
                Name::Import(path) if self.is_outside(module, path) => found.extend([Target::Outside]),
                Name::Import(path) => found.extend(self.resolve(module, path, tried)),
                Name::Word => {}
            }
        }
        for glob in if found.is_empty() { globs.as_slice() } else { &[] } {
            let path: Vec<_> = glob.iter().cloned().chain([name.to_owned()]).collect();
            found.extend(self.resolve(module, &path, tried));
        }
        if found.is_empty() && !known.is_empty() {
            found.extend([Target::Item(module)]);
        }
        found
    }
}

impl Module {
    fn exported_macros(&self) -> Vec<String> {
        let exported = self.items.iter().filter_map(|item| match item {
            syn::Item::Macro(item) if item.attrs.iter().any(|own| own.path().is_ident("macro_export")) => {
                item.ident.as_ref()
            }
            _ => None,
        });
        exported.map(ToString::to_string).collect()
    }

    /// Any word in a call of a macro that defines items may be the name of one.
    fn words(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Ident(word) => self.names.entry(word.to_string()).or_default().push(Name::Word),
                TokenTree::Group(group) => self.words(group.stream()),
                _ => {}
            }
        }
    }
}

/// Collects a module's definitions and imports, including those inside its functions.
struct Definitions<'a> {
    module: &'a mut Module,
}

impl Definitions<'_> {
    fn add(&mut self, item: &syn::Item) {
        use syn::Item;
        let name = match item {
            Item::Const(item) => &item.ident,
            Item::Enum(item) => &item.ident,
            Item::Fn(item) => &item.sig.ident,
            Item::Static(item) => &item.ident,
            Item::Struct(item) => &item.ident,
            Item::Trait(item) => &item.ident,
            Item::TraitAlias(item) => &item.ident,
            Item::Type(item) => &item.ident,
            Item::Union(item) => &item.ident,
            Item::Macro(syn::ItemMacro { ident: Some(ident), .. }) => ident,
            Item::Macro(item) => return self.module.words(item.mac.tokens.clone()),
            _ => return self.visit_item(item),
        };
        self.module.names.entry(name.to_string()).or_default().push(Name::Item);
        self.visit_item(item);
    }
}

impl<'ast> Visit<'ast> for Definitions<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for Imported { path, name } in imported(item) {
            match name {
                Some(name) => self.module.names.entry(name).or_default().push(Name::Import(path)),
                None => self.module.globs.push(path),
            }
        }
    }
}
