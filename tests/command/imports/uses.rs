//! Names introduced by `use`, and the attributes of items.

/// One name of a `use`; `None` is a glob import.
pub(super) struct Imported {
    pub(super) path: Vec<String>,
    pub(super) name: Option<String>,
}

pub(super) fn imported(item: &syn::ItemUse) -> Vec<Imported> {
    let mut found = Vec::new();
    if item.leading_colon.is_none() {
        spread(&item.tree, &mut Vec::new(), &mut found);
    }
    found
}

fn spread(tree: &syn::UseTree, before: &mut Vec<String>, found: &mut Vec<Imported>) {
    let joined = |last: &syn::Ident| before.iter().cloned().chain([last.to_string()]).collect();
    match tree {
        syn::UseTree::Path(tree) => {
            before.push(tree.ident.to_string());
            spread(&tree.tree, before, found);
            before.pop();
        }
        syn::UseTree::Name(tree) if tree.ident == "self" => {
            found.push(Imported { path: before.clone(), name: before.last().cloned() });
        }
        syn::UseTree::Name(tree) => {
            found.push(Imported { path: joined(&tree.ident), name: Some(tree.ident.to_string()) });
        }
        syn::UseTree::Rename(tree) => {
            found.push(Imported { path: joined(&tree.ident), name: Some(tree.rename.to_string()) });
        }
        syn::UseTree::Glob(_) => found.push(Imported { path: before.clone(), name: None }),
        syn::UseTree::Group(tree) => tree.items.iter().for_each(|tree| spread(tree, before, found)),
    }
}

pub(super) fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    use syn::Item;
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether the attributes contain `#[cfg(test)]`, alone or with further conditions.
pub(super) fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let text = list.tokens.to_string();
            text == "test" || text.starts_with("all (test")
        }
        _ => false,
    })
}
