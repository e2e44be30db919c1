def plan_page(found, estimate, steps):
    return ""
