"""Images in prompts: pictures, as a model's tower reads them, and the tokens that stand for them."""
